"""The mutation lists still fit the code: every edit applies, exactly once."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("tomllib", reason="the lists are read with Python 3.11 or newer")


def test_every_mutation_applies():
    spec = importlib.util.spec_from_file_location("mutation_runner", ROOT / "tests/mutations/run.py")
    runner = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = runner
    spec.loader.exec_module(runner)
    mutations = runner.read_lists(runner.chosen_lists(None))
    assert len(mutations) > 300
    wrong = []
    for mutation in mutations:
        try:
            assert mutation.mutated(ROOT) != (ROOT / mutation.file).read_text(encoding="utf-8")
        except runner.ListError as error:
            wrong.append(str(error))
        for argument in mutation.test.split():
            path = argument.split("::")[0]
            if path.startswith("tests/") and not (ROOT / path).exists():
                wrong.append(f"{mutation.source}: {mutation.name!r} names {path!r}, which does not exist")
    assert not wrong, "\n".join(wrong)
