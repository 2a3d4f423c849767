"""What a spelling is: a plain PyTorch text of one pattern, how to feed it, and what it must return.

A spelling names the tensors it takes (``takes="q k v g beta state"``); from the names alone the registry draws inputs
in the layout the spelling wants and, independently of the spelling's text, translates them to the arguments of
``token_recurrence``. Nothing here knows how a recogniser works.

Argument names: ``q k v`` (Mamba-2 authors write ``c b x`` for them), ``g`` log gate, ``g2`` the same in powers of two,
``w`` the same with a plus (decay ``exp(-w)``), ``alpha`` gate factor, ``gamma`` /
``log_gamma`` one decay per head, ``beta``, ``beta_logit``, ``dt`` (a step size: writes ``dt * x`` and decays by
``exp(dt * a)``), ``a`` (negative, one per head), ``gate_logit`` with ``a_log`` and ``dt_bias``, ``u`` (a bonus:
tokens read the state before their own write, and that write times u), ``state``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kdacompile.patterns.recurrence.definition import Reads, token_recurrence

PATTERNS = ("kda", "gated_delta_rule", "delta_rule", "gla", "simple_gla", "retention", "linear_attention")
DELTA = frozenset({"kda", "gated_delta_rule", "delta_rule"})
CHANNEL = frozenset({"kda", "gla"})
WRITTEN = frozenset({"k", "v", "beta", "beta_logit"})
"""Arguments of writes, of which a token may have several."""


@dataclass(frozen=True)
class Spelling:
    """One text of one pattern. ``fn(*make_inputs(...))`` must equal ``expected(inputs)``."""

    name: str
    fn: Callable[..., Any]
    pattern: str
    takes: tuple[str, ...]
    mode: str = "sequence"
    layout: str = "bthd"  # or "bhtd", "bhdt", "bhd" (a step without a time axis), "td" (one head, no batch)
    backwards: bool = False  # the last token comes first
    state_layout: str = "kv"  # or "vk"
    scale: float | None = None  # None: K ** -0.5
    l2norm_eps: float = 0.0
    activation: str = ""  # of gate_logit: "softplus", "sigmoid", "logsigmoid"
    gate_scale: float = 1.0
    constant_decay: tuple[float, ...] = ()  # a decay per head that the spelling carries itself
    strongest_gate: float = -3.0  # log gate drawn from (strongest, 0); factored forms need a mild one
    groups: int = 1  # value heads per key head
    writes: int = 1  # writes a token: k, v and beta have so many rows for each
    reads: Reads = "after"  # when a token reads the state: after its own write (with a bonus, before it)
    apart: bool = False  # those in a dimension of their own, after the tokens
    returns_state: bool = False
    in_place: bool = False  # the state argument is overwritten and not returned
    state_dtype: torch.dtype | None = None  # dtype of a given state where it differs from q's
    multiple: int = 1  # T must be a multiple of this
    lengths: tuple[int, ...] = (7,)  # lengths worth testing, cheapest first
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    tags: frozenset[str] = field(default_factory=frozenset)

    @property
    def delta(self) -> bool:
        return self.pattern in DELTA

    @property
    def has_state(self) -> bool:
        return "state" in self.takes

    def make_inputs(
        self,
        B: int = 2,
        T: int | None = None,
        H: int = 3,
        K: int = 8,
        V: int = 12,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> tuple[Tensor, ...]:
        """Random arguments for ``fn``, in its own layout; ``T`` defaults to the cheapest supported length."""
        length = self.lengths[0] if T is None else T
        if length % self.multiple:
            raise ValueError(f"{self.name} needs T to be a multiple of {self.multiple}, not {length}")
        batch, heads = (1, 1) if self.layout == "td" else (B, H)
        draw = _Draw(self, batch, length, heads, K, V, torch.Generator().manual_seed(seed))
        return tuple(self._cast(name, self._lay_out(name, draw(name)), dtype) for name in self.takes)

    def expected(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Output (in the spelling's layout) and final state (``[B, HV, K, V]``) by the fp64 token recurrence."""
        given = {name: self._canonical(name, x.double()) for name, x in zip(self.takes, inputs, strict=True)}
        q, k, v = (_first(given, names) for names in (("q", "c"), ("k", "b"), ("v", "x")))
        assert q is not None and k is not None and v is not None
        if self.l2norm_eps:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + self.l2norm_eps) for x in (q, k))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        decay, beta = self._decay(given), given.get("beta", given.get("dt"))
        if "beta_logit" in given:
            beta = given["beta_logit"].sigmoid()
        if self.backwards:
            q, k, v = q.flip(1), k.flip(1), v.flip(1)
            decay, beta = (x if x is None or x.dim() < 2 else x.flip(1) for x in (decay, beta))
        bonus, state = given.get("u"), given.get("state")
        reads = "before" if bonus is not None else self.reads
        options: dict[str, Any] = {"delta": self.delta, "scale": scale, "writes": self.writes, "reads": reads}
        o, state = token_recurrence(q, k, v, decay, beta, state, bonus=bonus, **options)
        return self._lay_out("o", o.flip(1) if self.backwards else o), state

    def read(self, outputs: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None]:
        """Split what ``fn`` returned into the output and the final state in ``[B, HV, K, V]``, if it gives one."""
        o, state = outputs if self.returns_state else (outputs, None)
        if self.in_place:
            state = inputs[self.takes.index("state")]
        if state is not None and self.state_layout == "vk":
            state = state.transpose(-1, -2)
        return o, state

    def _decay(self, given: dict[str, Tensor]) -> Tensor | None:
        """The factor ``exp(g)``, broadcastable to ``[B, T, HV, K]``."""
        if self.constant_decay:
            return torch.tensor(self.constant_decay, dtype=torch.float64).view(1, 1, -1, 1)
        if "gamma" in given:
            return given["gamma"].view(1, 1, -1, 1)
        if "log_gamma" in given:
            return given["log_gamma"].exp().view(1, 1, -1, 1)
        if "dt" in given:
            return (given["dt"] * given["a"]).exp().unsqueeze(-1)
        factor: Tensor | None = None
        if "alpha" in given:
            factor = given["alpha"]
        elif "g" in given:
            factor = given["g"].exp()
        elif "g2" in given:
            factor = given["g2"].exp2()
        elif "w" in given:
            factor = given["w"].neg().exp()
        elif "gate_logit" in given:
            factor = self._activate(given).exp()
        if factor is not None and self.pattern not in CHANNEL:
            factor = factor.unsqueeze(-1)
        return factor

    def _activate(self, given: dict[str, Tensor]) -> Tensor:
        x = given["gate_logit"]
        a_log, dt_bias = given.get("a_log"), given.get("dt_bias")
        if dt_bias is not None:
            x = x + dt_bias.view(x.shape[2:])
        rate = torch.ones((), dtype=x.dtype) if a_log is None else a_log.exp()
        if self.pattern in CHANNEL and a_log is not None:
            rate = rate.unsqueeze(-1)
        if self.activation == "softplus":
            return -rate * F.softplus(x, threshold=1000.0)
        if self.activation == "sigmoid":
            return self.gate_scale * torch.sigmoid(rate * x)
        return self.gate_scale * F.logsigmoid(x)

    def _lay_out(self, name: str, x: Tensor) -> Tensor:
        """From [B, T, H, ...] (state: [B, H, K, V]) to the spelling's own layout."""
        if name == "state":
            return x.transpose(-1, -2).contiguous() if self.state_layout == "vk" else x
        if x.dim() < 3:
            return x
        if self.apart and name in WRITTEN:
            x = x.unflatten(1, (-1, self.writes))
        if self.layout == "td":
            return x[0, :, 0]
        if self.layout == "bhdt":
            return x.movedim(1, -1).contiguous()
        if self.layout == "bhtd":
            return x.transpose(1, 2).contiguous()
        return x.squeeze(1) if self.layout == "bhd" else x

    def _canonical(self, name: str, x: Tensor) -> Tensor:
        if name == "state":
            return x.transpose(-1, -2) if self.state_layout == "vk" else x
        if name in {"gamma", "log_gamma", "a", "a_log", "dt_bias", "u"}:
            return x
        if self.apart and name in WRITTEN:
            return x.flatten(1, 2)
        if self.layout == "td":
            return x[None, :, None]
        if self.layout == "bhdt":
            return x.movedim(-1, 1)
        if self.layout == "bhtd":
            return x.transpose(1, 2)
        return x.unsqueeze(1) if self.layout == "bhd" else x

    def _cast(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(self.state_dtype if name == "state" and self.state_dtype is not None else dtype)


class _Draw:
    """Random tensors in the canonical layout. Keys are about unit norm so that the delta rule stays bounded."""

    def __init__(self, s: Spelling, batch: int, length: int, heads: int, k: int, v: int, rng: torch.Generator) -> None:
        self.s, self.rng = s, rng
        self.batch, self.length, self.heads, self.k_dim, self.v_dim = batch, length, heads, k, v
        self.value_heads = heads * s.groups

    def __call__(self, name: str) -> Tensor:
        tokens = (self.batch, self.length, self.value_heads)
        gate = (*tokens, self.k_dim) if self.s.pattern in CHANNEL else tokens
        rows = self.length * (self.s.writes if name in WRITTEN else 1)
        if name in {"q", "c", "k", "b"}:
            x = self._normal(self.batch, rows, self.heads, self.k_dim)
            return x if name in {"q", "c"} else x / x.norm(dim=-1, keepdim=True)
        if name in {"v", "x"}:
            return self._normal(self.batch, rows, self.value_heads, self.v_dim)
        if name in {"g", "g2", "w", "alpha"}:
            log_gate = self.s.strongest_gate * self._uniform(*gate)
            return {"g": log_gate, "g2": log_gate / math.log(2.0), "w": -log_gate, "alpha": log_gate.exp()}[name]
        if name in {"gamma", "log_gamma"}:
            gamma = 0.6 + 0.39 * self._uniform(self.value_heads)
            return gamma if name == "gamma" else gamma.log()
        if name in {"beta", "dt"}:
            return self._uniform(self.batch, rows, self.value_heads)
        if name == "a":
            return -0.1 - self._uniform(self.value_heads)
        if name == "a_log":
            return self._normal(self.value_heads) * 0.5
        if name == "dt_bias":
            return self._normal(*gate[2:])
        if name == "u":
            return self._normal(self.heads, self.k_dim)
        if name == "state":
            return self._normal(self.batch, self.value_heads, self.k_dim, self.v_dim)
        if name == "beta_logit":
            return self._normal(self.batch, rows, self.value_heads)
        if name == "gate_logit":
            return self._normal(*gate)
        raise KeyError(name)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.rng, dtype=torch.float64)


REGISTRY: dict[str, Spelling] = {}


def register(spelling: Spelling) -> Spelling:
    if spelling.name in REGISTRY:
        raise ValueError(f"two spellings are called {spelling.name}")
    if spelling.pattern not in PATTERNS:
        raise ValueError(f"{spelling.name}: unknown pattern {spelling.pattern}")
    REGISTRY[spelling.name] = spelling
    return spelling


def spelling(
    pattern: str, takes: str, *, name: str | None = None, **traits: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that registers the function below it; ``traits`` are the fields of :class:`Spelling`."""

    def wrap(fn: Callable[..., Any]) -> Callable[..., Any]:
        register(Spelling(name or fn.__name__, fn, pattern, tuple(takes.split()), **traits))
        return fn

    return wrap


def variant(base: str, suffix: str, fn: Callable[..., Any], **traits: Any) -> Spelling:
    """The same text with another constant (a chunk size, a flag), registered as ``<base>_<suffix>``."""
    return register(replace(REGISTRY[base], name=f"{base}_{suffix}", fn=fn, **traits))


def _first(given: dict[str, Tensor], names: tuple[str, ...]) -> Tensor | None:
    return next((given[name] for name in names if name in given), None)
