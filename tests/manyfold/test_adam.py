import subprocess
import sys

import torch

from manyfold.adam import Adam


def test_it_is_torchs_adam_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(1000, generator=generator), torch.empty(1000)
    theirs.copy_(ours)
    theirs.requires_grad_()
    theirs.grad = torch.zeros(1000)
    mine = Adam(ours, torch.zeros(1000), eps=1e-5)
    reference = torch.optim.Adam([theirs], lr=0.1, eps=1e-5, fused=True)
    for i in range(20):
        gradient = torch.randn(1000, generator=generator)
        mine.gradient.copy_(gradient)
        theirs.grad.copy_(gradient)
        reference.param_groups[0]["lr"] = 0.1 / (i + 1)
        mine.step(0.1 / (i + 1))
        reference.step()
    assert torch.equal(ours, theirs.detach())
    assert all(torch.equal(mine.state[name], x) for name, x in reference.state[theirs].items())


def test_it_does_not_wait_for_torchs_compiler():
    code = (
        "import sys, torch; from manyfold.adam import Adam; Adam(torch.zeros(3), torch.ones(3)).step(0.1);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
