"""Every torch-private name this project uses, in one place (torch 2.11 to 2.14).

What most of the package needs is here by name (``compat.example_value``); the other modules are asked for by those who
need them. Each has one reason, and goes once its thread at pytorch/pytorch (or as named) ends with a public way:

- ``nodes``, ``symbols``: what Dynamo's graph says of a node, a size and its guards, which export has as ``meta["val"]``
  and ``ShapeEnv``, documented as experimental. No thread.
- ``inductor``: the compiler itself, its options, its pre-grad passes and their cache keys. #174502, #177429.
- ``reporting``: errors that Dynamo hands on as they are, counts of graph breaks, artifacts for tlparse. No thread.
- ``dynamo``: a function replaced by an op where it is called, if it is proven to be one. ``substitute_in_graph`` takes
  functions that are named beforehand, for every compiler. #111441 (loops are unrolled).
- ``root``: the same for the compiled function itself, which nobody calls. #111441.
- ``sizes``: sizes opened while a graph is captured; ``mark_dynamic`` needs the caller's tensors. No thread.
- ``bases``: guards of tensors that inputs are slices of, left out. No thread.
- ``region``: graphs captured past boolean masks, see there. #114220, #163123 (it is so for ``fullgraph=True``).
- ``local``: what a call on DTensors does to a rank's tensors, which DTensor does not tell. No thread.
- ``operators``: writing down a function's operators at a fifth of the cost of ``make_fx``. No thread. Beside it
  dispatch modes and nested arguments, private by their path alone, #65761 (``torch.utils.pytree``), and an operator's
  declaration: #65997 asked for overloads, its pull request left accessors for later.
- ``dispatcher``: the ops' kernels call each other below autograd, with one way through Python. #177109, #139500.
- ``launches``: launches of compiled kernels. triton-lang/triton#10140.
- ``cudnn``: attention with its log-sum-exp. No thread.
- ``groups``: process groups by the names that operators hold. No thread.
- ``accepted``: says when torch is none of the versions tested.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

from kdacompile.compat import accepted
from kdacompile.compat.inductor import (
    PASS_OPTION,
    CustomGraphPass,
    aot_eager,
    aoti_load_package,
    as_passes,
    cache_key_tag,
    compile_fx,
    disk_caches,
    has_cpp_compiler,
    in_nested_graph,
    inductor_cache_dir,
    inductor_modes,
    inductor_option,
    inductor_option_type,
    inductor_options,
    no_fake_modes,
    no_python_dispatcher,
    no_saved_tensors_hooks,
    pass_uuid,
)
from kdacompile.compat.nodes import (
    ABSORBED,
    OWN_OPS,
    REPORTED,
    RUN_ERRORS,
    attribute,
    called,
    copy_of_graph,
    detaches_in_place,
    example_value,
    grad_mode_after,
    inference_mode_change,
    is_detach,
    is_graph_constant,
    is_mode_switch,
    is_opaque_call,
    is_own_op,
    is_random,
    is_traceable_wrapper_subclass,
    is_value,
    literal,
    memory_of,
    owner,
    propagate_fake,
    put_in_place,
    source_name,
    switches_modes,
    transforms,
    writes_first_argument,
    written_arguments,
)
from kdacompile.compat.reporting import (
    CONTROL_FLOW,
    DEVICE_ERRORS,
    ShortenTraceback,
    dynamo_settings,
    graph_break_behind,
    graph_breaks,
    trace_artifact,
)
from kdacompile.compat.symbols import (
    Guards,
    NoHint,
    alike,
    arithmetic_of,
    backed_hints,
    free_symbols,
    guarded_with,
    has_steps,
    in_range,
    is_assumption,
    is_number,
    is_one,
    is_read_of_tensor,
    is_unbacked,
    name_of,
    number_in,
    settle,
    shape_env,
    size_at,
    size_hint,
    stays_below,
    symbolic_sizes,
    tie,
    times_captured,
)
