"""Small norm classes as people write them, modules that look like norms and are not, and patching
with residual additions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rmsnorm import PatchReport, patch


def fused(model: nn.Module) -> PatchReport:
    """Patch ``model`` with its residual additions, those of short inputs too."""
    report = patch(model, fuse_residual=True)
    for module in model.modules():
        for name in "_rmsnorm_course", "_rmsnorm_slot":
            if module.__dict__.get(name) is not None:
                module.__dict__[name].least = 0
    return report


class CastThenWeight(nn.Module):
    """The row is cast back before the weight; eps is a literal in the code."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * (wide * rstd).type_as(x)


class NoCast(nn.Module):
    """Everything in x's own dtype, with a square root and a division."""

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + self.eps) * self.weight


class WeightThenCast(nn.Module):
    """The weight multiplies in float32, then the product is cast once."""

    def __init__(self, d: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self.scaled(x.float())).type_as(x)


class L2Scaled(nn.Module):
    """Built on F.normalize; the weight is called g."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale = d**0.5
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.g


class Original(nn.Module):
    """eps stands beside the root; optionally over the first part of the row only."""

    def __init__(self, d: int, part: float | None = None, eps: float = 1e-8) -> None:
        super().__init__()
        self.part = part
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        counted = x if self.part is None else x[..., : int(x.shape[-1] * self.part)]
        root = counted.norm(2, dim=-1, keepdim=True) * counted.shape[-1] ** -0.5
        return self.scale * (x / (root + self.eps))


class Gamma(WeightThenCast):
    """The same formula, the parameter called gamma, eps called epsilon."""

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.epsilon = eps
        self.gamma = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + self.epsilon)
        return (self.gamma * wide).to(x.dtype)


class ZeroCentred(nn.Module):
    """weight + 1, with a weight that starts at 0."""

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Grouped(nn.Module):
    """One mean square for each of several parts of the row, and a bias."""

    def __init__(self, d: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().unflatten(-1, (self.groups, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide.flatten(-2) * self.weight.float() + self.bias.float()).to(x.dtype)


class ConfigEps(WeightThenCast):
    """eps lives on a configuration that the module holds."""

    def __init__(self, d: int, eps: float = 1e-4) -> None:
        super().__init__(d)
        del self.eps
        self.config = type("Config", (), {})()
        self.config.rms_norm_eps = eps

    def scaled(self, x: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class ClassEps(WeightThenCast):
    """eps is an attribute of the class."""

    eps = 3e-6

    def __init__(self, d: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(d))


class IgnoredEps(WeightThenCast):
    """Takes an eps and computes with another."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LeadingOnes(WeightThenCast):
    """The weight has the shape (1, 1, d)."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.weight = nn.Parameter(torch.ones(1, 1, d))


class BufferWeight(WeightThenCast):
    """The weight is not trained."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        del self.weight
        self.register_buffer("weight", torch.ones(d))


# Not norms of this kind -------------------------------------------------------------------------


class HandLayerNorm(nn.Module):
    """Subtracts the mean; called RMSNorm nevertheless."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)


class VarianceNorm(nn.Module):
    """Divides by the standard deviation without subtracting the mean."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


class WrongAxis(WeightThenCast):
    """Normalises over the sequence."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


class DropoutInside(WeightThenCast):
    """Random in training."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class DynamicTanh(nn.Module):
    """tanh(alpha x) * weight + bias."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


class ScalarWeight(WeightThenCast):
    """One number scales the whole row."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.weight = nn.Parameter(torch.ones(1))


class ScaledBefore(WeightThenCast):
    """The weight multiplies before the mean square is taken."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled((x * self.weight).float()).type_as(x)


class Gated(WeightThenCast):
    """Multiplies by the activation of a second input."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate)


class GatedOptionally(WeightThenCast):
    """The same, the second input optional."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x if gate is None else x * F.silu(gate))


class AddsOptionally(WeightThenCast):
    """Adds a second input first."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x if residual is None else x + residual)


class Detached(WeightThenCast):
    """The right values with another gradient."""

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach()


class Counting(WeightThenCast):
    """Remembers how often it was called."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class InPlace(WeightThenCast):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(super().forward(x))


class TensorEps(WeightThenCast):
    """eps is a tensor that may change."""

    def __init__(self, d: int) -> None:
        super().__init__(d)
        del self.eps
        self.register_buffer("eps", torch.tensor(1e-5))


class Raises(nn.Module):
    """Cannot be asked."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no")


class ReturnsTuple(WeightThenCast):
    """Returns more than the norm."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class NonFiniteGuard(WeightThenCast):
    """Differs from the formula where a row is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(super().forward(x))
