"""Parts of the demo model's training: corpus, initial weights, schedule, evaluation."""
