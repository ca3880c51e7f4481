"""The kernels' workers take part in every job, and while they work, torch's own threads stay away."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from polytempo.engine.propose import ScriptedProposer
from polytempo.kernels.build import FLAGS, SOURCES, _compiler
from polytempo.kernels.threads import kernel_threads, torch_on_one_thread
from polytempo.llm import LLM
from polytempo.types import SamplingParams


def test_no_worker_misses_a_job(tmp_path):
    """It saw a job while it was being written, took it for done, and left it all to the caller."""
    flags = [flag for flag in FLAGS if flag != "-shared"]
    source, program = Path(__file__).with_name("pool_meet.cpp"), tmp_path / "pool_meet"
    subprocess.run([_compiler(), *flags, f"-I{SOURCES}", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout


def test_torch_gets_one_thread_and_the_kernels_keep_theirs(two_threads):
    assert kernel_threads() == 2
    with torch_on_one_thread():
        assert (torch.get_num_threads(), kernel_threads()) == (1, 2)
        with torch_on_one_thread():
            assert kernel_threads() == 2
    assert (torch.get_num_threads(), kernel_threads()) == (2, 2)
    torch.set_num_threads(1)
    assert kernel_threads() == 1, "what torch had before outlives the block"


def test_threads_come_back_after_an_error(two_threads):
    with pytest.raises(KeyError), torch_on_one_thread():
        raise KeyError
    assert (torch.get_num_threads(), kernel_threads()) == (2, 2)


def test_a_thread_that_starts_meanwhile_gets_all_threads(two_threads):
    """torch gave it the one thread of the moment for good, and its own steps kept to that."""

    def step():
        with torch_on_one_thread():
            within = torch.get_num_threads(), kernel_threads()
        return within, torch.get_num_threads(), kernel_threads()

    with torch_on_one_thread(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(step).result() == ((1, 2), 2, 2)
        assert (torch.get_num_threads(), kernel_threads()) == (1, 2)
    assert (torch.get_num_threads(), kernel_threads()) == (2, 2)


def test_the_torch_path_keeps_its_threads(two_threads):
    with torch_on_one_thread(wanted=False):
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("kernels", "expected"), [("native", 1), ("torch", 2)])
def test_threads_of_torch_within_a_step(two_threads, kernels, expected):
    llm = LLM(max_rows=1, max_model_len=64, kernels=kernels, progress=False)
    seen = []
    llm.engine.proposer = ScriptedProposer(lambda row, most: seen.append(torch.get_num_threads()) or [])
    llm.generate([[2, 3, 4]], SamplingParams(max_tokens=4, draft_len=1))
    assert set(seen) == {expected} and torch.get_num_threads() == 2
