"""The `device` option: which are known, what is refused before a model is read, and when a phase ends on one."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from fake_cuda import DEVICE, fake_cuda
from support import ENGINE, TINY

import polytempo.checkpoint.load as load_module
import polytempo.llm as llm_module
from polytempo import invariance
from polytempo.cache.layout import StateShape
from polytempo.cache.store import RowStore
from polytempo.checkpoint.load import load_model
from polytempo.cli import cli
from polytempo.device import require_room, resolve_device, to_device, upload
from polytempo.engine import step_clock
from polytempo.errors import ConfigError
from polytempo.llm import DEMO_MODEL, LLM
from polytempo.model import ops


def machine(monkeypatch, num_devices: int, cuda: str | None = "12.8") -> None:
    """Let torch say that it was built for `cuda` and finds so many devices."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def load_nothing(monkeypatch) -> None:
    """Fail if a model is read."""

    def refuse(*args):
        raise AssertionError("a model was read before the device was checked")

    monkeypatch.setattr(llm_module, "load_model", refuse)


@pytest.mark.parametrize("num_devices, name, expected", [
    (0, "cpu", "cpu"), (2, "cpu", "cpu"), (0, "cpu:0", "cpu"), (0, torch.device("cpu"), "cpu"), (0, "auto", "cpu"),
    (1, "auto", "cuda:0"), (1, "cuda", "cuda:0"), (2, "cuda:1", "cuda:1"), (2, torch.device("cuda", 1), "cuda:1"),
])  # fmt: skip
def test_devices_that_can_be_used(monkeypatch, num_devices, name, expected):
    machine(monkeypatch, num_devices)
    assert str(resolve_device(name)) == expected


@pytest.mark.parametrize("num_devices, name, message", [
    (1, "cdua", "unknown device 'cdua'; did you mean 'cuda'?"),
    (1, "", "unknown device ''; known: auto, cpu, cuda"),
    (1, "cuda:x", "is 'cuda:x'; write 'cuda', or an index as in 'cuda:1'"),
    (1, "cuda:-1", "is 'cuda:-1'; write 'cuda', or an index as in 'cuda:1'"),
    (1, "auto:1", "is 'auto:1'; write 'auto', or an index as in 'cuda:1'"),
    (1, "cpu:1", "is 'cpu:1'; all CPUs are one device, 'cpu'"),
    (1, "meta", "is 'meta'; polytempo runs on 'cpu' and 'cuda', not on 'meta'"),
    (1, "mps", "is 'mps'; polytempo runs on 'cpu' and 'cuda', not on 'mps'"),
    (1, "cuda:7", "is 'cuda:7', but there is only 'cuda:0'"),
    (2, "cuda:2", "is 'cuda:2', but there are 'cuda:0' to 'cuda:1'"),
    (0, "cuda", "finds no CUDA device; 'cpu' runs everywhere"),
    (0, "cuda:0", "finds no CUDA device; 'cpu' runs everywhere"),
])  # fmt: skip
def test_devices_that_cannot_are_refused_with_the_reason(monkeypatch, num_devices, name, message):
    machine(monkeypatch, num_devices)
    with pytest.raises(ConfigError, match="option 'device'") as caught:
        resolve_device(name)
    assert message in str(caught.value)


def test_a_torch_without_cuda_says_so(monkeypatch):
    machine(monkeypatch, 0, cuda=None)
    with pytest.raises(ConfigError, match="is built without CUDA; install a build with it; 'cpu' runs everywhere"):
        resolve_device("cuda")


@pytest.mark.parametrize("options, message", [
    ({"device": "cuda:9"}, "there is only 'cuda:0'"),
    ({"device": "cdua"}, "did you mean 'cuda'"),
    ({"device": "cuda", "kernels": "native"}, "the C\\+\\+ kernels run on the CPU; use kernels='auto' or 'torch'"),
    ({"kernels": "triton"}, "^option 'kernels' is 'triton', but the model is on cpu; .* run on a GPU; use 'auto' or"),
    ({"device": "cuda", "kernels": "triton"}, "^option 'kernels' is 'triton', but Triton is away; use 'auto' or"),
])  # fmt: skip
def test_nothing_is_read_before_the_device_is_known_to_work(monkeypatch, options, message):
    machine(monkeypatch, 1)
    monkeypatch.setattr(ops, "missing_triton", lambda: "Triton is away")
    load_nothing(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        LLM(**options)


def test_loading_checks_the_device_before_the_files(monkeypatch, tmp_path):
    machine(monkeypatch, 0)
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        load_model(tmp_path / "missing", device="cuda")


def test_auto_is_the_cpu_where_there_is_no_other(monkeypatch):
    machine(monkeypatch, 0)
    model, _ = load_model(DEMO_MODEL, device="auto", progress=False)
    assert model.device == torch.device("cpu")


def test_uploaded_arrays_keep_values_and_shapes():
    arrays = [torch.arange(6).view(2, 3).numpy(), torch.arange(0).numpy(), torch.arange(4).numpy()[::-1]]
    for tensor, array in zip(upload(arrays, torch.device("cpu")), arrays, strict=True):
        assert tensor.dtype == torch.int64 and tensor.tolist() == array.tolist()
    assert to_device([1, 2], torch.device("cpu"), torch.float32).tolist() == [1.0, 2.0]


# --- memory --------------------------------------------------------------------------------------------------


def memory(monkeypatch, free: int, reserved: int = 0, allocated: int = 0) -> None:
    """Let the only device have so many bytes free, besides what torch has reserved of it."""
    machine(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


def test_room_is_what_is_free_and_what_torch_holds_back(monkeypatch):
    memory(monkeypatch, free=2 * 2**30, reserved=3 * 2**30, allocated=2 * 2**30)
    require_room(torch.device("cuda", 0), 3 * 2**30, "weights", "x")
    require_room(torch.device("cpu"), 2**60, "weights", "the CPU is not asked")
    with pytest.raises(ConfigError, match="^weights take 3.00 GiB, and 'cuda:0' has 3.00 GiB free; lower it$"):
        require_room(torch.device("cuda", 0), 3 * 2**30 + 1, "weights", "lower it")


@pytest.mark.parametrize("weights, remedy", [
    ("expanded", "quantised ones take no more than their files"), ("packed", "use another device"),
])  # fmt: skip
def test_weights_without_room_are_refused_before_they_are_allocated(monkeypatch, weights, remedy):
    model, _ = load_model(DEMO_MODEL, weights=weights, progress=False)
    # An empty buffer says in which dtype a packed weight is expanded; it has no bytes.
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    memory(monkeypatch, free=needed - 1)
    with pytest.raises(ConfigError, match=f"^weights take .* 'cuda:0' has .* free; {remedy}"):
        load_model(DEMO_MODEL, device="cuda", weights=weights)
    asked = []
    monkeypatch.setattr(load_module, "require_room", lambda device, num_bytes, *words: asked.append(num_bytes))
    load_model(DEMO_MODEL, weights=weights, progress=False)
    assert asked == [needed]


def test_state_without_room_is_refused_before_it_is_allocated(monkeypatch):
    shape = StateShape.build(TINY, ENGINE)
    needed = 5 * shape.slot_bytes(4)
    with fake_cuda():
        memory(monkeypatch, free=needed)
        store = RowStore.allocate(shape, 5, torch.float32, DEVICE)
        assert sum(tensor.nbytes for layer in (*store.layers, *store.mtp) for tensor in layer.per_slot()) <= needed
        memory(monkeypatch, free=needed - 1)
        with pytest.raises(ConfigError, match="^rings of state of 5 rows take .* free; lower max_rows or max_chunk$"):
            RowStore.allocate(shape, 5, torch.float32, DEVICE)


# --- when a phase ends ---------------------------------------------------------------------------------------


class ScriptedEvent:
    """A CUDA event that the device passes when a script says, in milliseconds after the first."""

    passed: list[float] = []
    made: list[ScriptedEvent] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = self.passed[len(self.made)]
        self.is_recorded = self.is_synchronized = False
        self.made.append(self)

    def record(self, stream) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        self.is_synchronized = True

    def elapsed_time(self, later: ScriptedEvent) -> float:
        assert self.is_recorded and later.is_recorded and self.made[-1].is_synchronized
        return later.at - self.at


@pytest.mark.parametrize("host, passed, expected", [
    # Launched within 2 ms, done after 9; then the host waits for it, and drafting waits for nothing.
    ([0, 1, 2, 10, 11], [0, 1, 9, 9.5, 11], [1, 8, 1, 1]),
    # The device keeps up: what counts is the host.
    ([0, 1, 3, 4, 5], [0, 0.1, 0.2, 0.3, 0.4], [1, 2, 1, 1]),
    # What drafting launched last is still running when the host is done: it is this step's.
    ([0, 1, 2, 10, 11], [0, 1, 9, 9.5, 14], [1, 8, 1, 4]),
])  # fmt: skip
def test_a_phase_ends_when_the_device_has_done_its_work(monkeypatch, host, passed, expected):
    times = iter([at / 1e3 for at in host])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(ScriptedEvent, "passed", passed)
    monkeypatch.setattr(ScriptedEvent, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", ScriptedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = step_clock.StepClock(torch.device("cuda", 0))
    assert [clock.mark() for _ in range(4)] == pytest.approx([at / 1e3 for at in host[1:]])
    assert not any(event.is_synchronized for event in ScriptedEvent.made), "a mark waits for the device"
    assert clock.phases() == pytest.approx([ms / 1e3 for ms in expected])


def test_on_the_cpu_a_phase_is_the_host_s(monkeypatch):
    times = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(times))
    clock = step_clock.StepClock(torch.device("cpu"))
    assert [clock.mark() for _ in range(3)] == [1.0, 3.0, 6.0]
    assert clock.phases() == [1.0, 2.0, 3.0]


# --- the commands --------------------------------------------------------------------------------------------


SHORT = ("-b", "1", "--draft-lens", "0", "--max-tokens", "7", "--prompt-lens", "4")  # if it runs after all
COMMANDS = {
    "generate": ("--prompt", "a"), "chat": (), "serve": (), "demo": (), "bench": SHORT, "bench --profile": SHORT,
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_runs_a_model_takes_the_device(name):
    """A device that is not there is the one thing that shows, without a device, that the option arrives."""
    if torch.cuda.device_count() > 63:
        pytest.skip("this machine has a cuda:63")
    result = CliRunner().invoke(cli, [*name.split(), "--device", "cuda:63", *COMMANDS[name]])
    assert result.exit_code == 2 and result.stderr.count("Error: option 'device' is 'cuda:63', but") == 1, result.output


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"demo"}))  # which has no --kernels
def test_every_command_refuses_triton_on_the_cpu_before_it_loads(name, monkeypatch):
    load_nothing(monkeypatch)
    result = CliRunner().invoke(cli, [*name.split(), "--kernels", "triton", *COMMANDS[name]])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("Error: option 'kernels' is 'triton', but the model is on cpu") == 1, result.output


def test_invariance_probes_where_it_is_told_to(monkeypatch, capsys):
    asked = []

    def probe(config, dtypes, quiet=False, device="cpu"):
        asked.append(device)
        return []

    machine(monkeypatch, 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    monkeypatch.setattr(invariance, "run_probes", probe)
    assert invariance.main(["--device", "cuda:1"]) == 0 and asked == [torch.device("cuda", 1)]
    assert '"device": "cuda:1 (a device)"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        invariance.main(["--device", "cuda:2"])
    assert "there are 'cuda:0' to 'cuda:1'" in capsys.readouterr().err
