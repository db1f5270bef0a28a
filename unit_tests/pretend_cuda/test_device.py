"""The pretend CUDA device itself: what a GPU refuses is refused, and what the host waits for is counted."""

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from unit_tests.helpers.pretend_cuda import CudaTensor, needs_pretend_cuda

pytestmark = [needs_pretend_cuda, pytest.mark.usefixtures("cuda_device")]


def on_device(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


REFUSED = {
    "elementwise": lambda: on_device(3) + torch.ones(3),
    "a number on the device": lambda: on_device(1)[0] + torch.ones(3),
    "a number of the CPU that is added to": lambda: torch.tensor(2.0).add_(on_device(1)[0]),
    "matrix product": lambda: on_device(3, 3) @ torch.ones(3, 3),
    "cat": lambda: torch.cat([on_device(3), torch.ones(3)]),
    "a CPU index": lambda: on_device(3).index_select(0, torch.tensor([1])),
    "a number that selects": lambda: on_device(3).index_select(0, torch.tensor(1)),
    "index of a CPU tensor": lambda: torch.ones(3)[torch.tensor([1], device="cuda")],
    "values put": lambda: on_device(3).__setitem__(torch.tensor([0, 1], device="cuda"), torch.ones(2)),
    "to numpy": lambda: on_device(3).numpy(),
    "as an array": lambda: np.asarray(on_device(3)),
    "where": lambda: torch.where(on_device(3) > 0, torch.ones(3), 0.0),
}
TAKEN = {
    "a number of the CPU": lambda: on_device(3) * torch.tensor(2.0),
    "a CPU index in brackets": lambda: on_device(3)[torch.tensor([1])],
    "copied down": lambda: torch.ones(3).copy_(on_device(3)),
    "copied up": lambda: on_device(3).copy_(torch.ones(3)),
    "moved": lambda: on_device(3).cpu() + torch.ones(3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses_is_refused(name):
    with pytest.raises((RuntimeError, TypeError), match=r"device|cuda:0"):
        REFUSED[name]()


@pytest.mark.parametrize("name", TAKEN)
def test_what_a_gpu_takes_is_taken(name):
    assert TAKEN[name]().flatten()[0] > 0


def test_new_tensors_are_where_a_gpu_would_have_them():
    x = on_device(3).requires_grad_()
    made = [x * 2, x.new_zeros(2), torch.zeros_like(x), torch.tensor([1], device="cuda"), x.detach(), x.double()]
    [slope] = torch.autograd.grad((x.gather(0, torch.tensor([0], device="cuda")) ** 2).sum(), x)
    for tensor in (*made, slope):
        assert isinstance(tensor, CudaTensor) and tensor.device == torch.device("cuda:0") and tensor.is_cuda
    for tensor in (x.cpu(), x.to("cpu"), x.to(torch.ones(1)), torch.zeros(3)):
        assert type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    assert torch.zeros(3, device="meta").device.type == "meta", "of which models are made before their weights are read"


class ForgetsTheDevice(torch.autograd.Function):
    """A backward pass in Python that makes a tensor without naming a device, or moves one to the CPU."""

    @staticmethod
    def forward(ctx, x, mistake):
        ctx.mistake = mistake
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad + (torch.zeros(3) if ctx.mistake == "made" else grad.cpu()), None


@pytest.mark.parametrize("mistake", ["made", "moved"])
def test_a_backward_pass_in_python_is_no_formula_of_torch(mistake):
    x = on_device(3).requires_grad_()
    with pytest.raises(RuntimeError, match="same device"):
        ForgetsTheDevice.apply(x, mistake).sum().backward()


WAITS = {
    "item": (lambda x: x[0].item(), 1),
    "float": (lambda x: float(x.sum()), 1),
    "bool": (lambda x: bool((x > 0).all()), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "mask": (lambda x: x[x > 0], 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "arithmetic": (lambda x: (x * 2).sum(), 0),
    "from the host": (lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="cuda"), 0),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_of_the_host_are_counted(cuda_device, name):
    work, waits = WAITS[name]
    x = on_device(3)
    cuda_device.clear()
    work(x)
    assert cuda_device.syncs.total() == waits and cuda_device.uploads.total() == (name == "from the host")
    assert cuda_device.calls > 0


@pytest.mark.parametrize("window", [None, 2])
def test_the_kernel_of_variable_lengths_computes_attention(window):
    """Two segments; the second has three keys before its own. Against softmax written down, with its gradient."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8).bfloat16() for n in (5, 8, 8))
    given = [x.cuda().requires_grad_() for x in (q, k, v)]
    ends = [torch.tensor(e, dtype=torch.int32, device="cuda") for e in ([0, 3, 5], [0, 3, 8])]
    left = -1 if window is None else window - 1
    out = varlen_attn(*given, *ends, 3, 5, window_size=(left, 0))
    slopes = torch.autograd.grad(out.float().square().sum(), given)

    plain = [x.double().requires_grad_() for x in (q, k, v)]
    parts = []
    for a, b, c, d in ((0, 3, 0, 3), (3, 5, 3, 8)):
        scores = torch.einsum("nhd,mhd->hnm", plain[0][a:b], plain[1][c:d]) / 8**0.5
        at = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        back = at - torch.arange(d - c)[None]
        hidden = (back < 0) | (back >= (window or 99))
        parts.append(torch.einsum("hnm,mhd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), plain[2][c:d]))
    want = torch.cat(parts)
    expected = torch.autograd.grad(want.square().sum(), plain)
    for got, wanted in zip((out, *slopes), (want, *expected), strict=True):
        assert (got.detach().cpu().double() - wanted).norm() < 0.01 * wanted.norm()


def test_nothing_is_replaced_afterwards(cuda_device):
    assert torch.cuda.is_available()


@pytest.fixture(scope="module", autouse=True)
def _check_restored():
    yield
    assert not torch.cuda.is_available() and type(torch.ones(1) + 1) is torch.Tensor
    assert not torch.__future__.get_swap_module_params_on_conversion()
