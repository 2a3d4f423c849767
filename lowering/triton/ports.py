"""The ports of a program in emitted kernels: signature, addresses, loads with what is fused into them, the store of o.

A port's tensor has any strides. Address arithmetic that can pass 2^31 (token, head and batch offsets) is done once per
chunk in 64 bits; inside a tile 32 bits do.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..emitter import Lines
from ..gates import GATE_FUNCTIONS
from ..ir import Op
from .variant import Variant

_STRIDES = {"q": "bthd", "k": "bthd", "v": "bthd", "beta": "bth", "initial_state": "nhkv", "final_state": "nhkv"}
_KEY_HEADS = ("q", "k")


def strides(name: str, gate: str) -> list[str]:
    """The names of the stride arguments of a port."""
    if name == "g":
        letters = "bthd" if gate == "channel" else "bth"
    else:
        letters = _STRIDES[name]
    return [f"{name}_s{letter}" for letter in letters]


class PortText:
    """Emits what concerns ports for one kernel."""

    def __init__(self, variant: Variant, lines: Lines) -> None:
        self.variant = variant
        self.lines = lines

    def signature(
        self,
        kernel: str,
        ports: list[str],
        outputs: list[str],
        buffers: list[str],
        scalars: list[str],
        constants: Sequence[str],
    ) -> None:
        """Decorator and ``def`` line. Lengths and strides that change from call to call are not specialised on."""
        variant = self.variant
        pointers = [f"{name}_ptr" for name in ports]
        if "g" in ports:
            pointers += ["A_log_ptr"] * variant.rate + ["dt_bias_ptr"] * variant.bias
            scalars = [*scalars, "gate_scale"]
        if variant.l2norm and "q" in ports:
            scalars = [*scalars, "l2norm_eps"]
        pointers += [f"{name}_ptr" for name in outputs]
        sizes = ["T"] if ports or outputs else []
        if variant.packed:
            pointers += ["cu_seqlens", "chunk_offsets"] if sizes else ["chunk_offsets"]
            sizes.append("N")
        steps = [stride for name in ports for stride in strides(name, variant.gate)]
        self._def(kernel, [pointers, buffers, scalars, steps, sizes], constants)

    def step_signature(self, ports: list[str], states: list[str]) -> None:
        variant = self.variant
        pointers = [f"{name}_ptr" for name in (*ports, *states, *["state_indices"] * variant.pool)] + ["o_ptr"]
        pointers += ["A_log_ptr"] * variant.rate + ["dt_bias_ptr"] * variant.bias
        scalars = ["scale", *["gate_scale"] * ("g" in ports), *["l2norm_eps"] * variant.l2norm]
        steps = [stride for name in (*ports, *states) for stride in strides(name, variant.gate)]
        steps = [stride for stride in steps if not stride.endswith("_st")]
        self._def("step", [pointers, scalars, steps, ["N"] * variant.pool], "HV GROUP K V KP BV".split())

    def _def(self, kernel: str, arguments: list[list[str]], constants: Sequence[str]) -> None:
        # Strides of wide ports are specialised: what is known to be divisible by 16 is loaded 16 bytes at a time.
        varying = [name for group in arguments for name in group if name in ("T", "N", "beta_sb", "beta_st")]
        listed = ", ".join(f'"{name}"' for name in varying)
        self.lines.add(f"@triton.jit(do_not_specialize=[{listed}])")
        self.lines.add(f"def {kernel}(")
        for group in arguments:
            for start in range(0, len(group), 12):
                self.lines.add(f"    {', '.join(group[start : start + 12])},")
        for start in range(0, len(constants), 4):
            self.lines.add("    " + ", ".join(f"{name}: tl.constexpr" for name in constants[start : start + 4]) + ",")
        self.lines.add("):")
        self.lines.open()

    def bases(self, ports: list[str]) -> None:
        """The address of the chunk's first token for every port."""
        for name in ports:
            head = "(head // GROUP)" if name in _KEY_HEADS else "head"
            self.lines.add(f"{name}_base = {name}_ptr + batch * {name}_sb + first * {name}_st + {head} * {name}_sh")

    def gate_parameters(self) -> None:
        """Load exp(A_log) and dt_bias of the head where the gate has them."""
        if not GATE_FUNCTIONS[self.variant.gate_fn].parametric:
            return
        rate = "tl.exp(tl.load(A_log_ptr + head).to(tl.float32))" if self.variant.rate else "1.0"
        self.lines.add(f"rate = {rate}")
        if self.variant.bias:
            at = "head * K + d, mask=d < K, other=0.0" if self.variant.gate == "channel" else "head"
            self.lines.add(f"bias = tl.load(dt_bias_ptr + {at}).to(tl.float32)")

    def load(self, op: Op, *, turned: bool) -> str:
        """A tile of a port: [C, columns], or [columns, C]."""
        name, cols = str(op.attr("port")), op.result.type.cols
        token, live = ("j", "live_row") if turned else ("i", "live")
        if cols == 1:
            return f"tl.load({name}_base + {token} * {name}_st, mask={live}, other=0.0)"
        column, bound = ("c", "V") if cols == "V" else ("d", "K")
        address = f"{name}_base + {token} * {name}_st + {column} * {name}_sd"
        return f"tl.load({address}, mask={live} & ({column} < {bound}), other=0.0)"

    def prepared(self, op: Op, *, turned: bool) -> str:
        """An input as fp32, with what is fused into its load; the norms' reciprocals have been computed."""
        port = op.inputs[0].name
        x, live = f"{port}.to(tl.float32)", "live_row" if turned else "live"
        if port in _KEY_HEADS and self.variant.l2norm:
            return f"{x} * {port}_rate"
        if port == "beta" and self.variant.sigmoid_beta:
            return f"tl.where({live}, sigmoid({x}), 0.0)"
        if port == "g":
            live += " & (d < K)" if self.variant.gate == "channel" else ""
            return f"tl.where({live}, {self.gate(x)}, 0.0)"
        return x

    def gate(self, x: str) -> str:
        """The gate's log decay."""
        parametric = GATE_FUNCTIONS[self.variant.gate_fn].parametric
        x = f"{x} + bias" if parametric and self.variant.bias else x
        return f'log_gate({x}, {"rate" if parametric else "1.0"}, "{self.variant.gate_fn}", gate_scale)'

    def store_output(self, value: str) -> None:
        """o [B, T, HV, V], contiguous."""
        self.lines.add("o_base = o_ptr + ((batch * T + first) * HV + head) * V")
        self.lines.add(f"tl.store(o_base + j * (HV * V) + c, {value}, mask=live_row & (c < V))")
