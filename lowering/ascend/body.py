"""The body of a kernel: tasks of a plan as lines of Triton.

A value with a single row or column is a vector here, and takes its axis where it meets a tile. Where Cube and Vec meet
is the compiler's affair, with two exceptions in the scan that save it traffic: a value that is written to a buffer
anyway is read back from there by the products that want it, and a value that Vec makes for more than one product gets
such a buffer, because the compiler sends it once for every product otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..emitter import Emitter
from ..errors import TileProgramError
from ..ir import DType, Op, OpKind, Per, TileType, Value
from ..plan import Plan
from ..plan.buffers import lies_beside
from ..plan.units import is_product, is_widening
from ..stages import Scope, Task
from ..target import Unit
from .kernel import Argument, Kind, Scratch
from .prepare import Fused

_KEY_PORTS = ("q", "k")


class Body(Emitter):
    """Prints tasks; collects the arguments and the buffers they need."""

    def __init__(self, made: Plan, tasks: Iterable[Task], fused: Fused, *, turns: bool, columns: bool) -> None:
        super().__init__(made.program)
        self.buffers = {b.name: b for b in made.buffers}
        self.tasks = tuple(tasks)
        self._rest = self.tasks  # behind the current one
        self.arguments: dict[str, Argument] = {}
        self.scratch: dict[str, Scratch] = {}
        self._fused = fused
        self._turns = turns  # the kernel has a loop over chunks in which buffers per core are written again
        self._column, self._block = ("column", "BV") if columns else ("0", "V")  # of V, what a task has
        self._ahead = made.options.ahead
        self._in_memory = made.target.meeting == "global"  # where units meet
        self._made: set[Value] = set()
        self._loaded: dict[Value, str] = {}
        self._kept: dict[Value, str] = {}  # value -> where its tile can be read back from
        self._stored: set[Value] = set()  # what Cube has put there for Vec
        self._waiting: list[str] = []  # stores of it that need not come before Vec reads
        self._stores = {op.inputs[0]: str(op.attr("port")) for op in self.program.ops if op.kind is OpKind.STORE}

    def print(self) -> None:
        for place, task in enumerate(self.tasks):
            self._rest = self.tasks[place + 1 :]
            if task.output not in self._made:
                self._task(task)

    def argument(self, name: str, kind: Kind) -> str:
        self.arguments.setdefault(name, Argument(name, kind))
        return name

    # ---- operands

    def vec(self, value: Value) -> str:
        """``value`` as a variable of Vec."""
        if value in self._stored and value not in self._loaded:
            while self._waiting:
                self.lines.add(self._waiting.pop(0))
            self.lines.add(f"{value.name} = {self._read_back(value, turned=False)}")
            self._loaded[value] = value.name
        if value in self._made:
            return f"{value.name}.to(tl.float32)" if self._narrowed(value) else value.name
        if value in self._loaded:
            return self._loaded[value]
        op = self.program.producer(value)
        if op.kind is OpKind.CARRY:
            return value.name
        if is_widening(op) and op.inputs[0] in self._made:
            return f"{op.inputs[0].name}.to(tl.float32)"
        text, narrow = self._load(op.inputs[0] if is_widening(op) else value, turned=False)
        text = f"{text}.to(tl.float32)" if narrow and value.type.dtype is DType.ACC else text
        self.lines.add(f"{value.name} = {self._used(self._port_name(value), text)}")
        self._loaded[value] = value.name
        return value.name

    def cube(self, value: Value, *, turned: bool, left: bool) -> str:
        """``value`` as an operand of a product; loaded anew for each, since a product may overwrite its left one."""
        if value not in self._made or value in self._kept:
            name = "left" if left else "right"
            text = self._read_back(value, turned) if value in self._kept else self._load(value, turned=turned)[0]
            self.lines.add(f"{name} = {text}")
            return name
        text = f"tl.trans({value.name})" if turned else value.name
        again = any(value in task.inputs for task in self._rest)
        return f"({text} + 0.0)" if left and again else text

    def operand(self, value: Value, op: Op) -> str:
        """``value`` with the axis it needs in an elementwise op."""
        result, text, (rows, cols) = op.result, self.vec(value), value.type.shape
        if (rows, cols) == (1, 1) and result.type.shape == ("C", 1):
            return f"spread({text}, C, R)"
        if 1 in result.type.shape or 1 not in (rows, cols):
            return text
        if (rows, cols) == (1, 1) and result.type.rows != "K":
            raise TileProgramError("a number can only scale the rows of a [K, ..] tile", str(result))
        return f"{text}[None, :]" if rows == 1 and cols != 1 else f"{text}[:, None]"

    def _used(self, port: str, text: str) -> str:
        """Gates and beta as the recurrence has them; tokens that do not exist decay by nothing."""
        fused = self._fused
        if port == "beta" and fused.sigmoid_beta:
            return f"sigmoid({text})"
        if port != "g" or fused.gate_fn == "log":
            return f"floor_gate({text})" if port == "g" else text
        given = [("A_log_ptr", fused.rate), ("dt_bias_ptr", fused.bias)]
        rate, bias = (self.argument(name, Kind.F32) if has else "g_ptr" for name, has in given)
        scale = self.argument("gate_scale", Kind.NUMBER) if "gate_scale" in fused.formula else "0.0"
        self.lines.add(f"rate, bias = gate_parameters({rate}, {bias}, head, HV, C)")
        return f"log_gate({text}, rate, bias, {scale}, rows, C)"

    def _narrowed(self, value: Value) -> bool:
        buffer = self.buffers.get(value.name)
        return buffer is not None and buffer.dtype is DType.IO and value.type.dtype is DType.ACC

    # ---- memory

    def _port_name(self, value: Value) -> str:
        op = self.program.producer(value)
        op = self.program.producer(op.inputs[0]) if is_widening(op) else op
        return str(op.attr("port")) if op.kind is OpKind.LOAD else ""

    def _load(self, value: Value, *, turned: bool) -> tuple[str, bool]:
        """A load of a tile from where another kernel or the caller has put it, and whether it is in the io dtype."""
        name = self._port_name(value)
        if not name:
            return self._buffer_load(self._buffer(value), turned)
        port = self.program.port(name)
        if port.per is not Per.TOKENS:
            raise TileProgramError("a port with one tile a step", str(port))
        if port.type.cols == 1:
            return f"tl.load({self._numbers(name)}, boundary_check=(0,))", False
        narrow = name != "g"
        pointer = self.argument(f"{name}_ptr", Kind.IO if narrow else Kind.F32)
        head, heads = ("head // (HV // H)", "H") if name in _KEY_PORTS else ("head", "HV")
        text = f"tl.load({self._tokens(pointer, head, heads, port.type.cols)}, boundary_check=(0,))"
        # a load that is turned by its own strides loses its boundary check on the way to Cube
        return (f"tl.trans({text})" if turned else text), narrow

    def _numbers(self, port: str) -> str:
        """One a token, of the tile's."""
        pointer, tokens = self.argument(f"{port}_ptr", Kind.F32), self.argument("tokens", Kind.COUNT)
        return f"gates_at({pointer}, token, head, rows, {tokens}, C)"

    def _tokens(self, pointer: str, head: str, heads: str, cols: object) -> str:
        column, block = (self._column, self._block) if cols == "V" else ("0", cols)
        return f"tokens_at({pointer}, token, {head}, rows, {column}, {heads}, C, {cols}, {block})"

    def _buffer(self, value: Value) -> Scratch:
        """The buffer in which a value lies between kernels. A single number is kept as a vector, see ``load_one``."""
        shape = ("K", 1) if value.type.shape == (1, 1) else value.type.shape
        buffer = self.buffers.get(value.name)
        narrow = value.type.dtype is DType.IO or (buffer is not None and buffer.dtype is DType.IO)
        return self.scratch.setdefault(value.name, Scratch(value.name, Kind.IO if narrow else Kind.F32, shape))

    def _buffer_load(self, buffer: Scratch, turned: bool) -> tuple[str, bool]:
        return f"tl.load({self._at(buffer, turned)})", buffer.kind is Kind.IO

    def _at(self, buffer: Scratch, turned: bool = False) -> str:
        pointer = self.argument(f"{buffer.name}_ptr", buffer.kind)
        at = "core" if buffer.per_core else "at"
        rows, cols = buffer.shape
        if 1 in (rows, cols):
            return f"vector_at({pointer}, {at}, {cols if rows == 1 else rows})"
        if turned:
            return f"turned_at({pointer}, {at}, {rows}, {cols})"
        if cols != "V":
            return f"tile_at({pointer}, {at}, 0, {rows}, {cols}, {cols})"
        if buffer.per_core:
            return f"tile_at({pointer}, {at}, 0, {rows}, {self._block}, {self._block})"
        return f"tile_at({pointer}, {at}, {self._column}, {rows}, V, {self._block})"

    def _read_back(self, value: Value, turned: bool) -> str:
        buffer = self.scratch[self._kept[value]]
        return f"tl.load({self._at(buffer, turned)})"

    # ---- tasks

    def _task(self, task: Task) -> None:
        value = task.output
        if lies_beside(task):
            self._made.add(value)
            self._kept[value] = task.inputs[1].name
            return
        text = self._part(task) if task.part else self.expression(task.op)
        if not text:
            return
        self._made.add(value)
        if text == value.name:
            return
        if self._narrowed(value):
            text = f"({text}).to(io)" if task.unit is Unit.VEC else f"{text}.to(io)"
        self.lines.add(f"{value.name} = {text}")
        self._keep(task)

    def _keep(self, task: Task) -> None:
        """Store what the caller or another kernel reads, or what several products of this one do."""
        value = task.output
        if value in self._stores:
            port = self._stores[value]
            if value.type.cols == 1:
                target = self._numbers(port)
            else:
                kind = Kind.IO if value.type.dtype is DType.IO else Kind.F32
                target = self._tokens(self.argument(f"{port}_ptr", kind), "head", "HV", value.type.cols)
            self.lines.add(f"tl.store({target}, {value.name}, boundary_check=(0,))")
        buffer = self.buffers.get(value.name)
        if buffer is not None and buffer.scope is Scope.TENSOR:
            if value.type.shape == (1, 1):
                pointer = self.argument(f"{value.name}_ptr", self._buffer(value).kind)
                self.lines.add(f"store_number({pointer}, at, {value.name}, K, R)")
                return
            self.lines.add(f"tl.store({self._at(self._buffer(value))}, {value.name})")
            if self._turns or task.unit is Unit.CUBE:
                self._kept[value] = value.name
        elif buffer is not None and buffer.scope is Scope.WORKSPACE and self._has_place(task):
            kind = Kind.IO if buffer.dtype is DType.IO else Kind.F32
            self.scratch[value.name] = Scratch(value.name, kind, value.type.shape, per_core=True)
            store = f"tl.store({self._at(self.scratch[value.name])}, {value.name})"
            if task.unit is Unit.CUBE and not self._turns:
                self._waiting.append(store)  # between two loads of one operand it would make two operands of it
            else:
                self.lines.add(store)
            self._kept[value] = value.name
            self._stored |= {value} if task.unit is Unit.CUBE else set()

    def _has_place(self, task: Task) -> bool:
        """Whether what crosses units has a buffer of the kernel's own: what several products of the scan read, what
        Cube is to store at once, and the parts of an inverse, joined in place."""
        if task.unit is Unit.CUBE:
            return self._in_memory and self._is_stored_at_once()
        readers = [t for t in self.tasks if task.output in t.inputs[:2]]
        if any(t.op.kind is OpKind.UNIT_LOWER_INVERSE and t.part for t in readers if t.unit is Unit.CUBE):
            return True
        products = [t for t in readers if is_product(t.op)]
        wide = any(t.op.inputs[1].type.dtype is DType.ACC for t in products)
        return wide or (self._turns and len(products) > 1)

    def _is_stored_at_once(self) -> bool:
        """Of what Cube has just made: in the scan, what the next state waits for, where Cube has other products to do;
        without any the compiler stores it at once by itself. In a prologue, what Vec makes an inverse of: the compiler
        would cut into blocks before it rounds, and so send in fp32 what is rounded."""
        if self._turns:
            return any(t.unit is Unit.CUBE and is_product(t.op) for t in self._rest)
        return any(t.part == "blocks" for t in self._rest)

    def on_eye(self, op: Op) -> str:
        return "ones_on_diagonal(C)"

    def on_cast(self, op: Op) -> str:
        return f"{self.vec(op.inputs[0])}.to(io)"

    def on_scale(self, op: Op) -> str:
        return f"{self.vec(op.inputs[0])} * {self.argument(str(op.attr('by')), Kind.NUMBER)}"

    def on_normalise(self, op: Op) -> str:
        self.argument(str(op.attr("by")), Kind.NUMBER)
        return self.plain(op)

    def on_mul(self, op: Op) -> str:
        return "" if self._is_summed_in_pieces(op.result) else self.plain(op)

    def on_row_sum(self, op: Op) -> str:
        (x,) = op.inputs
        if not self._is_summed_in_pieces(x):
            return self.plain(op)
        states = (self.program.producer(v).inputs[0] for v in self.program.producer(x).inputs)
        pointers = (self.argument(f"{v.name}_ptr", self._buffer(v).kind) for v in states)
        return f"row_products({', '.join(pointers)}, at, K, V, BV)"

    def _is_summed_in_pieces(self, value: Value) -> bool:
        """Whether a product of states is only there to be summed: two whole states have no room in UB."""
        op = self.program.producer(value)
        return (
            op.kind is OpKind.MUL
            and value.type.shape == ("K", "V")
            and all(is_widening(self.program.producer(v)) for v in op.inputs)
        )

    def on_transpose(self, op: Op) -> str:
        return self.vec(self._vector(op))  # a vector has no orientation until it meets a tile

    def on_reduce(self, op: Op) -> str:
        return f"column_sum({self.vec(self._vector(op))}, {op.inputs[0].type.rows}, R)"

    def on_cumsum(self, op: Op) -> str:
        x = self.vec(self._vector(op))
        return f"rest_sum({x}, C)" if op.attr("reverse", False) else f"tl.cumsum({x}, 0)"

    def on_mask(self, op: Op) -> str:
        return f"lower({self.vec(op.inputs[0])}, C, {bool(op.attr('strict', False))})"

    def on_unit_lower_inverse(self, op: Op) -> str:
        return f"unit_lower_inverse({self.vec(op.inputs[0])}, C, R, LEVELS)"

    def _vector(self, op: Op) -> Value:
        """The operand of an op that there is for vectors alone."""
        if 1 not in op.inputs[0].type.shape:
            raise TileProgramError("no Ascend text for this op", str(op))
        return op.inputs[0]

    def on_dot(self, op: Op) -> str:
        if not is_product(op) or op.attr("negate", False):
            raise TileProgramError("not a product for Cube", str(op))
        x = self.cube(op.inputs[0], turned=bool(op.attr("trans_a", False)), left=True)
        y = self.cube(op.inputs[1], turned=bool(op.attr("trans_b", False)), left=False)
        acc = f", {op.inputs[2].name}" if len(op.inputs) == 3 else ""
        return f'tl.dot({x}, {y}{acc}, input_precision="ieee")'

    def _part(self, task: Task) -> str:
        """The expression of a part of a macro-op; "" where another task's covers it."""
        parts = {OpKind.GATED_GRAM: self._gram_part, OpKind.GATED_DOT: self._weighted_part}
        return parts.get(task.op.kind, self._inverse_part)(task)

    def _weighted_part(self, task: Task) -> str:
        """Parts of ``gated_dot``. With a gate per channel pairs are weighted block by block, from where they lie, and
        what follows is another kernel's."""
        if task.op.inputs[2].type.cols != 1:
            weights, scaled = (self.argument(f"{value.name}_ptr", Kind.IO) for value in task.inputs)
            out = self.argument(f"{self._buffer(task.output).name}_ptr", Kind.F32)
            turned = bool(task.op.attr("trans_a", False))
            self.lines.add(f"pairs_below({out}, {weights}, {scaled}, at, C, K, R, LEVELS, {turned})")
            return ""
        if task.part == "decayed":
            return f"({self.vec(task.inputs[0])} * {self._decays(task.op)}).to(io)"
        x = self.cube(task.inputs[0], turned=bool(task.op.attr("trans_a", False)), left=True)
        return f'tl.dot({x}, {self.cube(task.inputs[1], turned=False, left=False)}, input_precision="ieee")'

    def _decays(self, op: Op) -> str:
        """The decays between a chunk's tokens, by the gates that an op on pairs has."""
        if "decays" not in self._loaded.values():
            self.lines.add(f"decays = token_decays({self.vec(op.inputs[2])}, C)")
            self._loaded[Value("decays", TileType("C", "C"))] = "decays"
        return "decays"

    def _inverse_part(self, task: Task) -> str:
        """Parts of ``unit_lower_inverse``: blocks and what is below them on Vec, in a buffer where Cube joins them."""
        op = task.op
        if task.part == "blocks":
            x = self.vec(op.inputs[0])
            if len(task.inputs) > 1:
                inverted = self._buffer_load(self._buffer(task.inputs[1]), turned=False)[0]
                return f"tl.where(same_block(C, R), {inverted}, -{x})"
            return f"inverse_of_blocks({x}, -{x}, C, R)"
        if task.part == "join" and task.inputs[1] not in self._made:
            blocks, narrow = (self._pointer(v) for v in (task.inputs[1], self._beside(task.output)))
            self.lines.add(f"join_rounded({blocks}, {narrow}, at, C, R, LEVELS)")
        elif task.part == "join":
            blocks = f"{op.result.name}_blocks"
            self.lines.add(f"join_blocks({blocks}_ptr, core, C, R, LEVELS)")
            self._made.add(op.result)
            self._kept[op.result] = blocks
        return ""

    def _beside(self, value: Value) -> Value:
        """What lies in a tensor beside which Cube puts a value."""
        return next(t.inputs[1] for t in self.tasks if t.inputs[0] == value and (t.part == "left" or lies_beside(t)))

    def _pointer(self, value: Value) -> str:
        buffer = self._buffer(value)
        return self.argument(f"{buffer.name}_ptr", buffer.kind)

    def _gram_part(self, task: Task) -> str:
        """Parts of ``gated_gram``. Level by level the scaled rows and columns come from ``sub_chunks``."""
        op, name = task.op, task.op.result.name
        strict = bool(op.attr("strict", False))
        if op.inputs[2].type.cols != 1 or self._ahead:
            apart = task.part == "triangle" or any(t.part == "triangle" and t.op is op for t in self.tasks)
            gram = (
                self.argument(f"{name}_diagonal_ptr", Kind.F32) if apart else self._pointer(self._beside(task.output))
            )
            if task.part == "product":
                rows, cols = (self.argument(f"{value.name}_ptr", Kind.IO) for value in task.inputs)
                self.lines.add(f"gram_below({gram}, {rows}, {cols}, at, C, K, R, LEVELS)")
            return f"lower(tl.load(tile_at({gram}, at, 0, C, C, C)), C, {strict})" if task.part == "triangle" else ""
        if task.part == "rows":
            return f"{self.vec(op.inputs[0])}.to(io)"
        if task.part == "product":
            x = self.cube(task.inputs[0], turned=False, left=True)
            y = self.cube(task.inputs[1], turned=True, left=False)
            return f'tl.dot({x}, {y}, input_precision="ieee")'
        return f"lower({self.vec(task.inputs[0])} * {self._decays(op)}, C, {strict})"
