"""Convert DIR/official for llama.cpp: DIR/model.gguf, experts in fp4 and the other matrices in bfloat16.

    python benchmarks/peers/to_gguf.py LLAMA_CPP DIR

LLAMA_CPP is a source tree of llama.cpp. Its own converter does the work, but for the vocabulary: a random model has
none, so the file says "none" and how many tokens there are. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    sys.path[:0] = [str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.deepseek import DeepseekV4Model

    def set_vocab(model: DeepseekV4Model) -> None:
        model._set_vocab_none()
        model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])

    DeepseekV4Model.set_vocab = set_vocab
    target = options.folder / "model.gguf"
    sys.argv[1:] = [str(options.folder / "official"), "--outfile", str(target), "--outtype", "bf16"]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
