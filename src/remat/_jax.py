"""Everything that differs between JAX versions or isn't public yet.

No other module touches `jax._src` (a test holds this). Each use says why it is here,
and what happens where it is missing.
"""
# Which names exist depends on the version of JAX, not on that of the type checker's.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

import inspect
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jaxlib
from jax import lax
from jax.extend import core, linear_util, source_info_util
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import closed_call_p, jit_p, name_p, scan_p
from jax.extend.core.primitives import remat_p as jax_remat_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType, NamedSharding, reshard

__all__ = ["ClosedJaxpr", "DebugInfo", "JaxprEqn", "Literal", "Var", "name_p"]

JAXLIB_VERSION: tuple[int, ...] = tuple(
    int("".join(c for c in part if c.isdigit()) or 0)
    for part in jaxlib.__version__.split(".")[:3]
)


def trace(
    fun: Callable[..., Sequence[Any]], avals: Sequence[Any], debug_info: DebugInfo
) -> tuple[ClosedJaxpr, list[Any]]:
    """The jaxpr of `fun` on flat operands of types `avals`, and what it closed over.

    The jaxpr has no constants: what `fun` closed over are its leading operands. Mutable
    arrays that `fun` made for itself are gone from it; what they held is passed along.
    """
    if len(debug_info.arg_names or ()) != len(avals):
        debug_info = debug_info._replace(arg_names=("",) * len(avals))
    debug_info = debug_info._replace(result_paths=None)
    wrapped = linear_util.wrap_init(fun, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, list(avals))[:3]
    # jax < 0.11 returns an open jaxpr, later ones a jaxpr that carries its constants.
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    invars = [*jaxpr.constvars, *jaxpr.invars]
    closed = build_jaxpr(invars, jaxpr.outvars, jaxpr.eqns, like=jaxpr)
    if ref_effects(closed) and not any(map(is_ref, closed.in_avals)):
        closed, more = _without_refs(closed)
        consts = [*more, *consts]
    return closed, list(consts)


def _without_refs(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """`closed` with the values of its mutable arrays passed along, and new consts.

    It stays as it is where JAX has no way to do so.
    """
    try:
        eqns = [_with_pure_function(eqn) for eqn in closed.eqns]
        inner = closed.jaxpr
        program = build_jaxpr(inner.invars, inner.outvars, eqns, like=inner)
        pure = _discharged(program)
    except NotImplementedError:
        return closed, []
    inner = pure.jaxpr
    invars = [*inner.constvars, *inner.invars]
    operands_only = build_jaxpr(invars, inner.outvars, inner.eqns, like=inner)
    return operands_only, list(pure.consts)


def _discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    if _discharge_state is None:
        raise NotImplementedError
    return _discharge_state(closed, lower=False)


def _with_pure_function(eqn: JaxprEqn) -> JaxprEqn:
    """`eqn`, where what has a derivative rule of its own makes no mutable arrays.

    JAX would drop the rule, or has no way to do it.
    """
    if not ref_effects(eqn) or not any(True for _ in core.jaxprs_in_params(eqn.params)):
        return eqn
    if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        if any(is_ref(v.aval) for v in eqn.invars):
            raise NotImplementedError
        return _with_programs(eqn, _discharged)

    def inside(program: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr = program.jaxpr
        eqns = [_with_pure_function(e) for e in jaxpr.eqns]
        return ClosedJaxpr(jaxpr.replace(eqns=eqns), program.consts)

    return _with_programs(eqn, inside)


def _with_programs(
    eqn: JaxprEqn, change: Callable[[ClosedJaxpr], ClosedJaxpr]
) -> JaxprEqn:
    """`eqn` with the programs in its parameters changed, and their effects its own."""

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return change(value)
        if isinstance(value, Jaxpr):
            return change(ClosedJaxpr(value, ())).jaxpr
        return tuple(map(changed, value)) if type(value) is tuple else value

    params = {name: changed(value) for name, value in eqn.params.items()}
    before = frozenset().union(*(j.effects for j in core.jaxprs_in_params(eqn.params)))
    after = frozenset().union(*(j.effects for j in core.jaxprs_in_params(params)))
    return eqn.replace(params=params, effects=eqn.effects - (before - after))


try:
    # Private; without it mutable arrays are refused.
    from jax._src.state.discharge import discharge_state as _discharge_state
except ImportError:
    _discharge_state = None


def build_jaxpr(
    invars: Sequence[Var],
    outvars: Sequence[Var | Literal],
    eqns: Sequence[JaxprEqn],
    *,
    like: Jaxpr,
) -> ClosedJaxpr:
    """A closed jaxpr without constants, its effects gathered from the equations.

    It is said to come from where `like` comes from. From jax 0.12 on, it also is "high"
    if `like` is: then some of its primitives (`custom_root` is one) have to be replaced
    before they can be lowered.
    """
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    debug_info = like.debug_info._replace(
        arg_names=("",) * len(invars), result_paths=("",) * len(outvars)
    )
    jaxpr = Jaxpr((), list(invars), list(outvars), list(eqns), effects, debug_info)
    if getattr(like, "is_high", False):
        jaxpr = jaxpr.replace(is_high=True)
    return ClosedJaxpr(jaxpr, ())


def register_to_low(
    primitive: core.Primitive, rule: Callable[..., Sequence[Any]]
) -> None:
    """Register what replaces `primitive` where its jaxpr is "high".

    The rule is called like the primitive, and binds it with the result of `to_low`.
    """
    primitive.is_high = lambda *avals, jaxpr, **params: getattr(jaxpr, "is_high", False)
    primitive.to_lojax = rule


def to_low(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """`jaxpr` with its "high" primitives replaced; it may have constants then."""
    return pe.lower_jaxpr2(jaxpr)


def new_equation(
    primitive: core.Primitive,
    invars: Sequence[Var | Literal],
    outvars: Sequence[Var],
    params: dict[str, Any],
    *,
    like: JaxprEqn,
    effects: Any = core.no_effects,
) -> JaxprEqn:
    """An equation at the place in the source of the equation `like`."""
    return core.new_jaxpr_eqn(
        list(invars),
        list(outvars),
        primitive,
        params,
        effects,
        like.source_info,
        like.ctx,
    )


@dataclass(frozen=True, eq=False)
class Call:
    """What a call equation evaluates, if that can be written in its place.

    Attributes:
        jaxpr: a program without constants.
        in_shardings: for each operand, the sharding that the call puts it in, or None.
        out_shardings: likewise for each result.
    """

    jaxpr: ClosedJaxpr
    in_shardings: tuple[Any, ...]
    out_shardings: tuple[Any, ...]


def plain_call(eqn: JaxprEqn) -> Call | None:
    """What `eqn` calls; None if it is no call, or has layouts or options of its own."""
    params = eqn.params
    if eqn.primitive is closed_call_p:
        jaxpr = params["call_jaxpr"]
        in_shardings = (None,) * len(eqn.invars)
        out_shardings = (None,) * len(eqn.outvars)
    elif eqn.primitive is jit_p:
        jaxpr = params["jaxpr"]
        layouts = (*params["in_layouts"], *params["out_layouts"])
        if params["compiler_options_kvs"] or any(x is not None for x in layouts):
            return None
        in_shardings, out_shardings = (
            # The mark of an absent sharding is a private singleton of this class.
            tuple(None if type(s).__name__ == "UnspecifiedValue" else s for s in given)
            for given in (params["in_shardings"], params["out_shardings"])
        )
    else:
        return None
    shardings = (*in_shardings, *out_shardings)
    if jaxpr.consts or not all(map(_can_be_constrained_to, shardings)):
        return None
    return Call(jaxpr, in_shardings, out_shardings)


def jit_of_more_operands(
    params: dict[str, Any], num_added: int, jaxpr: ClosedJaxpr
) -> dict[str, Any]:
    """The parameters of a jit equation that evaluates `jaxpr`, with operands in front.

    They are put nowhere in particular.
    """

    def after(mark: Any, values: Sequence[Any]) -> tuple[Any, ...]:
        return (mark,) * num_added + tuple(values)

    return dict(
        params,
        jaxpr=jaxpr,
        in_shardings=after(_absent_sharding(), params["in_shardings"]),
        in_layouts=after(None, params["in_layouts"]),
        donated_invars=after(False, params["donated_invars"]),
    )


@lru_cache(maxsize=1)
def _absent_sharding() -> Any:
    """The mark of an absent sharding, a private singleton."""
    info = DebugInfo("call", "call", (), None)
    with jax.disable_jit(False):
        call = jax.jit(lambda x: x)
        program, _ = trace(lambda x: [call(x)], [jax.typeof(0.0)], info)
    return program.eqns[0].params["in_shardings"][0]


def _can_be_constrained_to(sharding: Any) -> bool:
    if sharding is None:
        return True
    return isinstance(sharding, NamedSharding) and len({*sharding.mesh.axis_types}) == 1


def constrained_to(x: Any, sharding: NamedSharding) -> Any:
    """`x` in `sharding`, by the call that is meant for the axes of its mesh."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        return reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def users_checkpoint(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What `eqn` evaluates if it is a `jax.checkpoint` not yet differentiated."""
    if eqn.primitive is not jax_remat_p or eqn.params["differentiated"]:
        return None
    return ClosedJaxpr(eqn.params["jaxpr"], ())


def rewritable_call(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What `eqn` evaluates if it is a call that may return more than it does.

    Besides a plain one that is the forward rule of a `custom_vjp` made with
    `optimize_remat=True`, whose primitive is private.
    """
    if eqn.primitive is closed_call_p:
        return eqn.params["call_jaxpr"]
    return eqn.params["fwd_jaxpr"] if eqn.primitive.name == "remat_opt" else None


_CALLS_WITH_RULE = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
}


def call_with_rule(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What `eqn` evaluates if it is a call with a rule for some transformation."""
    parameter = _CALLS_WITH_RULE.get(eqn.primitive.name)
    return None if parameter is None else eqn.params[parameter]


def source_location(eqn: JaxprEqn) -> tuple[str, str] | None:
    """Where in the user's own code `eqn` was made: `file:line`, and that in words."""
    traceback = eqn.source_info.traceback
    if traceback is None or _user_frames is None:
        return None
    for frame in _user_frames(traceback):
        if not is_in_jax(frame.file_name):
            source = f"{frame.file_name}:{frame.start_line}"
            return source, f"{source} ({frame.function_name})"
    return None


try:
    # Private: what JAX itself prints in its messages. Without it no place is told.
    from jax._src.source_info_util import user_frames as _user_frames
except ImportError:
    _user_frames = None


def num_bytes(aval: Any) -> int:
    """The size of values of type `aval`; random keys count what they are made of."""
    dtype = aval.dtype
    if is_extended(aval):
        data = jax.eval_shape(jax.random.key_data, aval)
        return num_bytes(data)
    return aval.size * dtype.itemsize


def is_extended(aval: Any) -> bool:
    """Whether values of type `aval` are random keys."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants and carried values a scan equation has."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # From jax 0.11 on its operands are a tree, the type of which is private.
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scan_equation(
    like: JaxprEqn,
    body: ClosedJaxpr,
    invars: Sequence[Var | Literal],
    outvars: Sequence[Var],
    num_consts: int,
    num_carry: int,
) -> JaxprEqn:
    """A loop like `like`, but with another body and other operands and results."""
    if body is like.params["jaxpr"] and list(outvars) == list(like.outvars):
        return like
    params = like.params
    out_types = tuple(aval.strip_weak_type() for aval in body.out_avals)

    def run(*operands: Any) -> list[Any]:
        consts, rest = operands[:num_consts], operands[num_consts:]

        def step(carry: Any, xs: Any) -> tuple[Any, Any]:
            outs = opaque_p.bind(*consts, *carry, *xs, out_types=out_types)
            return outs[:num_carry], outs[num_carry:]

        carry, ys = lax.scan(
            step,
            list(rest[:num_carry]),
            list(rest[num_carry:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *ys]

    # From jax 0.11 on a scan says which operand is what in a private type. So that it
    # needs no knowing, the parameters are those of a scan with a body that is opaque.
    types = [v.aval.strip_weak_type() for v in invars]
    with jax.disable_jit(False):
        traced, _ = trace(run, types, DebugInfo("scan", "scan", (), None))
    (scan,) = traced.eqns
    assert list(scan.invars) == list(traced.jaxpr.invars)
    return new_equation(
        scan_p,
        invars,
        outvars,
        dict(scan.params, jaxpr=body),
        like=like,
        effects=body.effects,
    )


# Evaluates anything, in a program that is only traced for the types in it.
opaque_p = core.Primitive("opaque")
opaque_p.multiple_results = True


@opaque_p.def_abstract_eval
def _opaque_types(*avals: Any, out_types: tuple[Any, ...]) -> tuple[Any, ...]:
    del avals
    return out_types


def is_shard_map(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a `shard_map`, whose primitive is private."""
    return eqn.primitive.name == "shard_map"


def shard_map_body(eqn: JaxprEqn) -> ClosedJaxpr:
    """What a `shard_map` equation evaluates on each device."""
    return ClosedJaxpr(eqn.params["jaxpr"], ())


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual axes of the mesh along which a value in a `shard_map` varies."""
    return aval.mat.varying


def stacked_type(aval: Any, length: int) -> Any:
    """The type of `length` values of type `aval`, stacked along a leading axis."""
    return _stacked_type(aval, length, trace_context())


@lru_cache(maxsize=1024)
def _stacked_type(aval: Any, length: int, context: Hashable) -> Any:
    del context
    info = DebugInfo("stack", "stack", (), None)
    stacked, _ = trace(lambda x: [lax.broadcast(x, (length,))], [aval], info)
    return stacked.out_avals[0]


def is_in_jax(path: str) -> bool:
    """Whether a source file belongs to JAX itself rather than to its user."""
    return path.startswith(_JAX_FOLDER)


# Our frames are none of the user's: not in messages, profiles and compiled programs.
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)
_JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep


def evaluate(jaxpr: ClosedJaxpr, *operands: Any) -> list[Any]:
    """Evaluate `jaxpr`, keeping the source lines and name scopes of its equations."""
    return core.jaxpr_as_fun(jaxpr)(*operands)


@lru_cache(maxsize=1024)
def dce(
    jaxpr: ClosedJaxpr, used: tuple[bool, ...]
) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """Drop unused outputs, then dead equations; also which operands are still used.

    Cached, since all that is derived from a jaxpr is kept by its identity.
    """
    live, used_inputs = pe.dce_jaxpr(jaxpr.jaxpr, list(used), instantiate=False)
    if all(used) and all(used_inputs) and len(live.eqns) == len(jaxpr.eqns):
        return jaxpr, (True,) * len(used_inputs)
    return ClosedJaxpr(live, ()), tuple(used_inputs)


def register_dce(
    primitive: core.Primitive,
    rule: Callable[[list[bool], JaxprEqn], tuple[list[bool], JaxprEqn | None]],
) -> None:
    """Register a dead-code rule: used outputs, equation -> used inputs, new equation.

    From jax 0.12 rules are told in between which Refs are read later; an existing rule
    shows which form it is.
    """
    takes = inspect.signature(pe.dce_jaxpr_closed_call_rule).parameters
    if len(takes) == 2:
        pe.dce_rules[primitive] = rule
    else:
        pe.dce_rules[primitive] = lambda used, live, eqn: rule(used, eqn)  # pyright: ignore[reportArgumentType]


def register_checkify(
    primitive: core.Primitive, rule: Callable[..., Sequence[Any]]
) -> None:
    """Register how `primitive` is called when `checkify` makes its checks results.

    The rule is called with the operands of the checked program, how many of these are
    new (its constants and the errors so far, which come first), `jaxpr=` that program
    and the other parameters.
    """
    if _checkify is None:
        return
    to_checked = _checkify.jaxpr_to_checkify_jaxpr
    takes_context = hasattr(_checkify, "CheckifyContext")

    def check(*args: Any, jaxpr: ClosedJaxpr, **params: Any) -> Any:
        # From jax 0.11 on a context comes first.
        context, args = (args[:1], args[1:]) if takes_context else ((), args)
        error, enabled, *operands = args
        errors, tree = jax.tree.flatten(error)
        values = [*errors, *operands]
        checked, out_tree, _ = to_checked(
            *context, jaxpr, enabled, tree, *map(jax.typeof, values)
        )
        outs = rule(*values, num_added=len(errors), jaxpr=checked, **params)
        return jax.tree.unflatten(out_tree, outs)

    _checkify.error_checks[primitive] = check


try:
    # Private: the rules of checkify. Without them its checks can't pass a checkpoint.
    from jax._src import checkify as _checkify
except ImportError:
    _checkify = None


def lower_inline(ctx: Any, jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> Any:
    """Lower `jaxpr` in place, in a rule for the primitive that carries it.

    `mlir.lower_fun` does the same by tracing the jaxpr again, which costs as much as
    all our rules together; it is the fallback if the keywords below ever change.
    """
    known = {
        "dim_var_values": lambda: ctx.dim_var_values,
        "const_lowering": lambda: ctx.const_lowering,
        "outer_traceback": lambda: ctx.traceback,
    }
    if set(_SUBCOMP_KEYWORDS) <= set(known):
        keywords = {name: known[name]() for name in _SUBCOMP_KEYWORDS}
        outs, tokens = mlir.jaxpr_subcomp(
            ctx.module_context,
            jaxpr.jaxpr,
            ctx.name_stack.extend("remat"),
            ctx.tokens_in,
            (),
            *operands,
            **keywords,
        )
        ctx.set_tokens_out(tokens)
        return outs
    return mlir.lower_fun(partial(evaluate, jaxpr))(ctx, *operands)


_SUBCOMP_KEYWORDS = tuple(
    name
    for name, parameter in inspect.signature(mlir.jaxpr_subcomp).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


def lowers_for_cpu(ctx: Any) -> bool:
    """Whether a lowering rule is asked for code for the CPU."""
    platforms = ctx.platforms or ctx.module_context.platforms
    return "cpu" in platforms


def batch(
    jaxpr: ClosedJaxpr, axis_data: Any, dims: Sequence[Any]
) -> tuple[ClosedJaxpr, list[bool]]:
    """`jaxpr` with operands batched at `dims`; it may have constants then.

    Also for each output whether it is batched (at 0). One that depends on no batched
    operand stays unbatched.
    """
    batched, out_batched = _batch_jaxpr_axes(
        jaxpr, axis_data, tuple(dims), (_zero_if_mapped,) * len(jaxpr.out_avals)
    )
    return batched, list(out_batched)


try:
    _batch_jaxpr_axes = batching.batch_jaxpr_axes
    _zero_if_mapped = batching.zero_if_mapped
except AttributeError:
    # jax 0.10 keeps them private; `jax.vmap` can't leave single outputs unbatched.
    from jax._src.interpreters import batching as _private_batching

    _batch_jaxpr_axes = _private_batching.batch_jaxpr_axes
    _zero_if_mapped = _private_batching.zero_if_mapped

try:
    _backward_pass = ad.backward_pass
except AttributeError:
    # jax 0.10 keeps it private; `jax.linear_transpose` would trace everything twice.
    from jax._src.interpreters.ad import backward_pass as _backward_pass


def transpose(
    jaxpr: ClosedJaxpr, operands: Sequence[Any], cotangents: Sequence[Any]
) -> list[Any]:
    """Cotangents of the operands that are `ad.UndefinedPrimal`, by transposition.

    Equations that depend on none of those are evaluated first. Results are values or
    `ad.Zero`.
    """
    return _backward_pass(jaxpr.jaxpr, True, (), list(operands), list(cotangents))


def is_ref(aval: Any) -> bool:
    """Whether `aval` is the type of a mutable array; the class itself is private."""
    return hasattr(aval, "inner_aval")


def side_effects(eqn: JaxprEqn) -> bool:
    """Whether evaluating `eqn` twice differs from evaluating it once.

    A collective has the effect of naming its axis, which is none of those; the class
    of that effect is private.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def ref_effects(program: ClosedJaxpr | JaxprEqn) -> bool:
    """Whether `program` reads or writes mutable arrays; their effects are private."""
    kinds = {type(effect).__name__ for effect in program.effects}
    return bool(
        kinds & {"ReadEffect", "WriteEffect", "AccumEffect"}
        or any("MutableArray" in kind for kind in kinds)
    )


try:
    # Private; without it the public settings below are the key of what is traced.
    from jax._src.config import trace_context as _trace_context
except ImportError:
    _trace_context = None

try:
    # Private; without it a backend is taken as started.
    from jax._src.xla_bridge import backends_are_initialized as _backends_initialized
except ImportError:
    _backends_initialized = None


def trace_context() -> Hashable:
    """The ambient settings that tracing depends on (precision, x64, mesh, axes)."""
    if _trace_context is not None:
        return _trace_context()
    return (
        jax.config.jax_enable_x64,
        jax.config.jax_default_matmul_precision,
        jax.config.jax_numpy_dtype_promotion,
        core.get_opaque_trace_state(),
    )


def invalid_values() -> tuple[bool, bool]:
    """Whether JAX was told to look for NaNs, and for infinities."""
    return jax.config.jax_debug_nans, jax.config.jax_debug_infs


def platforms_setting() -> str:
    """The platforms that JAX was told to use, comma-separated; '' for any."""
    return jax.config.jax_platforms or ""


def backends_started() -> bool:
    """Whether XLA has read its flags."""
    return _backends_initialized is None or _backends_initialized()
