"""The primitive `remat_p` with its rules, and `checkpoint`, which binds it.

One primitive serves both directions. Its parameters are

    jaxpr         what to evaluate: a program without constants
    policy        which values to save when it is differentiated; None for none
    prevent_cse   for each operand, whether recomputation from it is kept apart
    num_linear    how many of its trailing operands it is linear in
    staged        whether recomputation is emitted just in time, behind barriers
    check_names   whether names in the policy that occur nowhere are to be reported

Differentiation emits two of them: one for outputs and saved values, one for tangents.
Reverse mode makes the first known and the second unknown by itself, so no rule for
partial evaluation is needed; and since both are `remat_p` again, derivatives of any
order are rematerialized too.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import jax
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir

from remat import _barriers
from remat._arguments import declare, shown, static_spec
from remat._constants import without_constants
from remat._errors import (
    NameArgumentError,
    RematError,
    UnknownNameWarning,
    UnsupportedError,
    caller_stacklevel,
)
from remat._flatten import trace_flat
from remat._invalid import evaluate_checked
from remat._jax import (
    ClosedJaxpr,
    batch,
    dce,
    lower_inline,
    lowers_for_cpu,
    name_p,
    new_equation,
    register_checkify,
    register_dce,
    register_to_low,
    side_effects,
    to_low,
    trace_context,
    transpose,
)
from remat._linearize import (
    NotLinearizableError,
    Split,
    check_refs,
    is_differentiable,
    split,
    with_tangents,
    without_dead_equations,
)
from remat._policies import Policy, check_policy, saved_names
from remat._primitive import remat_p
from remat._saving import names_in
from remat._stage import staged as stage
from remat._trace import TracedCall, trace_call

# Evaluation. Outside of `jit` each call is compiled as one computation, so that the
# intermediate values of a backward pass can be freed and staging has its effect.


@lru_cache(maxsize=1024)
def _compiled(**params: Any) -> Callable[..., Any]:
    @jax.jit
    def compiled(*operands):
        if any(isinstance(x, Tracer) for x in operands):
            return remat_p.bind(*operands, **params)
        # Not compiled: `jax.disable_jit`, or `jax.debug_nans` in search of a culprit.
        return evaluate_checked(params["jaxpr"], *operands)

    return compiled


@remat_p.def_impl
def remat_impl(*operands, **params):
    return _compiled(**params)(*operands)


@remat_p.def_effectful_abstract_eval
def remat_abstract_eval(*avals, jaxpr: ClosedJaxpr, **params):
    del avals, params
    return jaxpr.out_avals, jaxpr.effects


def remat_lowering(
    ctx, *operands, jaxpr: ClosedJaxpr, num_linear, prevent_cse, staged, **params
):
    del params
    if staged:
        with_barriers = stage(jaxpr, num_linear, prevent_cse)
        if with_barriers is not jaxpr and lowers_for_cpu(ctx):
            _barriers.warn_if_deleted()
        jaxpr = with_barriers
    return lower_inline(ctx, jaxpr, operands)


mlir.register_lowering(remat_p, remat_lowering)


def remat_to_low(*operands, jaxpr: ClosedJaxpr, prevent_cse, **params):
    low, consts = without_constants(to_low(jaxpr))
    prevent_cse = (False,) * len(consts) + prevent_cse
    return remat_p.bind(
        *consts, *operands, jaxpr=low, prevent_cse=prevent_cse, **params
    )


register_to_low(remat_p, remat_to_low)


def remat_checkify(
    *operands, num_added: int, jaxpr: ClosedJaxpr, prevent_cse, **params
):
    checked, consts = without_constants(jaxpr)
    apart = (False,) * (len(consts) + num_added) + prevent_cse
    return remat_p.bind(*consts, *operands, jaxpr=checked, prevent_cse=apart, **params)


register_checkify(remat_p, remat_checkify)


# Batching. Whether an output is batched is left to the program: one that depends on no
# batched operand stays as it is, which `jacfwd` of `jacrev` relies on.


def remat_batch(axis_data, operands, dims, *, jaxpr: ClosedJaxpr, **params):
    batched, out_batched = batch(jaxpr, axis_data, dims)
    batched, consts = without_constants(batched)
    params["prevent_cse"] = (False,) * len(consts) + params["prevent_cse"]
    outs = remat_p.bind(*consts, *operands, jaxpr=batched, **params)
    return outs, [0 if b else None for b in out_batched]


batching.fancy_primitive_batchers[remat_p] = remat_batch


# Differentiation.


def remat_jvp(
    primals,
    tangents,
    *,
    jaxpr: ClosedJaxpr,
    policy,
    prevent_cse,
    num_linear,
    staged,
    check_names,
):
    nonzero = tuple(not _is_zero(t) for t in tangents)
    if not any(nonzero):  # nothing but tangents of integers
        outs = remat_p.bind(
            *primals,
            jaxpr=jaxpr,
            policy=policy,
            prevent_cse=prevent_cse,
            num_linear=num_linear,
            staged=staged,
            check_names=check_names,
        )
        return outs, [ad.Zero(aval.to_tangent_aval()) for aval in jaxpr.out_avals]
    try:
        parts = split(jaxpr, nonzero, policy, any(prevent_cse))
    except NotLinearizableError:
        return _jvp_whole(primals, tangents, jaxpr, policy, prevent_cse)
    if check_names:
        _warn_of_unknown_names(jaxpr, parts, policy)
    operands = [*parts.consts, *primals]
    prevent_cse = (False,) * len(parts.consts) + prevent_cse
    common = {"policy": policy, "staged": staged, "check_names": False}
    results = remat_p.bind(
        *operands,
        jaxpr=parts.known,
        prevent_cse=prevent_cse,
        num_linear=num_linear,
        **common,
    )
    saved = [results[i] for i in parts.saved]
    given = (t for t, nz in zip(tangents, nonzero, strict=True) if nz)
    # A tangent that nothing reads would have a zero for a cotangent, which the rule of
    # scan in jax 0.10 can't take.
    active = [t for t, read in zip(given, parts.active, strict=True) if read]
    keep_apart = any(prevent_cse)
    out_tangents = iter(
        remat_p.bind(
            *saved,
            *(operands[i] for i in parts.needed),
            *active,
            jaxpr=parts.tangent,
            prevent_cse=(
                (keep_apart,) * len(saved)
                + tuple(prevent_cse[i] for i in parts.needed)
                + (keep_apart,) * len(active)
            ),
            num_linear=len(active),
            **common,
        )
    )
    outs = results[: len(parts.out_nonzero)]
    return outs, [
        next(out_tangents) if nz else ad.Zero(aval.to_tangent_aval())
        for nz, aval in zip(parts.out_nonzero, jaxpr.out_avals, strict=True)
    ]


ad.primitive_jvps[remat_p] = remat_jvp


def _jvp_whole(primals, tangents, jaxpr: ClosedJaxpr, policy, prevent_cse):
    """Forward mode in one call, where values and tangents don't come apart."""
    nonzero = tuple(not _is_zero(t) for t in tangents)
    joint, consts = with_tangents(jaxpr, nonzero)
    active = [t for t, nz in zip(tangents, nonzero, strict=True) if nz]
    results = remat_p.bind(
        *consts,
        *primals,
        *active,
        jaxpr=joint,
        policy=policy,
        prevent_cse=(
            (False,) * len(consts) + prevent_cse + (any(prevent_cse),) * len(active)
        ),
        num_linear=0,
        staged=False,
        check_names=False,
    )
    outs = results[: len(jaxpr.out_avals)]
    out_tangents = iter(results[len(jaxpr.out_avals) :])
    return outs, [
        next(out_tangents)
        if is_differentiable(aval)
        else ad.Zero(aval.to_tangent_aval())
        for aval in jaxpr.out_avals
    ]


def remat_transpose(
    cotangents, *operands, jaxpr: ClosedJaxpr, prevent_cse, staged, **params
):
    del staged
    unknown = tuple(ad.is_undefined_primal(x) for x in operands)
    nonzero = tuple(not _is_zero(ct) for ct in cotangents)
    transposed, consts, out_nonzero = _transposed(
        jaxpr, unknown, nonzero, trace_context()
    )
    known = [x for x, u in zip(operands, unknown, strict=True) if not u]
    active = [ct for ct, nz in zip(cotangents, nonzero, strict=True) if nz]
    keep_apart = tuple(p for p, u in zip(prevent_cse, unknown, strict=True) if not u)
    params["num_linear"] = len(active)
    results = iter(
        remat_p.bind(
            *consts,
            *known,
            *active,
            jaxpr=transposed,
            prevent_cse=(
                (False,) * len(consts) + keep_apart + (any(prevent_cse),) * len(active)
            ),
            staged=True,
            **params,
        )
    )
    outs = []
    for operand, is_unknown, nz in zip(operands, unknown, out_nonzero, strict=True):
        if not is_unknown:
            outs.append(None)
        elif nz:
            outs.append(next(results))
        else:
            outs.append(ad.Zero(operand.aval))
    return outs


@lru_cache(maxsize=256)
def _transposed(
    jaxpr: ClosedJaxpr, unknown: tuple[bool, ...], nonzero: tuple[bool, ...], context
) -> tuple[ClosedJaxpr, tuple[Any, ...], tuple[bool, ...]]:
    """Transpose `jaxpr` in its unknown operands, for the nonzero cotangents only."""
    del context
    in_avals, out_avals = jaxpr.in_avals, jaxpr.out_avals
    known_avals = [a for a, u in zip(in_avals, unknown, strict=True) if not u]
    ct_avals = [a.to_ct_aval() for a, nz in zip(out_avals, nonzero, strict=True) if nz]
    out_nonzero: list[bool] = []

    def transposed(*args: Any) -> list[Any]:
        known, cts = iter(args[: len(known_avals)]), iter(args[len(known_avals) :])
        operands = [
            ad.UndefinedPrimal(aval.to_ct_aval()) if u else next(known)
            for aval, u in zip(in_avals, unknown, strict=True)
        ]
        out_cts = [
            next(cts) if nz else ad.Zero(aval.to_ct_aval())
            for aval, nz in zip(out_avals, nonzero, strict=True)
        ]
        try:
            results = transpose(jaxpr, operands, out_cts)
        except ValueError as error:
            if "Reverse-mode differentiation does not work" not in str(error):
                raise
            raise UnsupportedError(
                "A function given to remat.checkpoint has a lax.while_loop, or a "
                "lax.fori_loop with bounds that are traced, and was differentiated in "
                "reverse mode. The number of iterations isn't known beforehand, so "
                "there is no room to save what each needs. Use lax.scan, or fori_loop "
                "with Python integers as bounds. Forward mode (jax.jvp, jax.jacfwd) "
                "works as it is."
            ) from error
        out_nonzero[:] = [
            u and not _is_zero(ct) for ct, u in zip(results, unknown, strict=True)
        ]
        return [ct for ct, nz in zip(results, out_nonzero, strict=True) if nz]

    traced, consts = trace_flat(
        transposed, [*known_avals, *ct_avals], jaxpr.jaxpr.debug_info
    )
    check_refs(traced)
    return (
        without_dead_equations(traced),
        tuple(consts),
        tuple(out_nonzero),
    )


ad.primitive_transposes[remat_p] = remat_transpose


def _is_zero(tangent: Any) -> bool:
    return (
        isinstance(tangent, ad.Zero)
        or getattr(tangent, "dtype", None) == jax.dtypes.float0
    )


def _warn_of_unknown_names(jaxpr: ClosedJaxpr, parts: Split, policy):
    """Report names in the policy that occur nowhere, once the names are all known.

    Names in the forward rule of a `custom_vjp` only appear when it is linearized.
    """
    wanted = saved_names(policy)
    if not wanted:
        return
    found = names_in(jaxpr.eqns) | names_in(parts.primal.eqns)
    found |= names_in(parts.tangent.eqns)  # in nested checkpoints
    unknown = wanted - found
    if unknown:
        listed = ", ".join(repr(n) for n in sorted(unknown))
        present = (
            "The names that do occur are " + ", ".join(repr(n) for n in sorted(found))
            if found
            else "No value of the function is named; name one with "
            "remat.checkpoint_name(x, name)"
        )
        occur, it = ("occurs", "it") if len(unknown) == 1 else ("occur", "them")
        function = jaxpr.jaxpr.debug_info.func_src_info
        warnings.warn(
            f"The policy {policy!r} names {listed}, which {occur} nowhere in the "
            f"function {function}, so nothing is saved for {it}. {present}.",
            UnknownNameWarning,
            stacklevel=caller_stacklevel(),
        )


# Dead code.


def remat_dce(used, eqn):
    if all(used):
        return [True] * len(eqn.invars), eqn
    if not any(used) and not side_effects(eqn):
        return [False] * len(eqn.invars), None
    params = eqn.params
    jaxpr, used_inputs = dce(params["jaxpr"], tuple(used))
    num_known = len(eqn.invars) - params["num_linear"]
    new_params = dict(
        params,
        jaxpr=jaxpr,
        prevent_cse=tuple(
            p for p, u in zip(params["prevent_cse"], used_inputs, strict=True) if u
        ),
        num_linear=sum(used_inputs[num_known:]),
    )
    new_eqn = new_equation(
        remat_p,
        [v for v, u in zip(eqn.invars, used_inputs, strict=True) if u],
        [v for v, u in zip(eqn.outvars, used, strict=True) if u],
        new_params,
        like=eqn,
        effects=jaxpr.effects,
    )
    return list(used_inputs), new_eqn


register_dce(remat_p, remat_dce)


# What the user calls.


def checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    policy: Policy | None = None,
    prevent_cse: Any = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """Make `fun` recompute, rather than save, what its derivative needs.

    The same call as `jax.checkpoint`, and the same values and derivatives as `fun`. A
    differentiated call saves its arguments and what `policy` allows, and recomputes the
    rest just before the backward pass needs it, so that the peak memory really falls.

    Use it as `@checkpoint`, as `@checkpoint(policy=...)` or as `checkpoint(fun, ...)`.

    Args:
        fun: a function of pytrees of arrays that returns a pytree of arrays. It is
            traced once for each set of static arguments and types of the others.
        policy: which intermediate values may be saved: a policy of `remat.policies`, or
            any function `policy(prim, *avals, **params) -> bool` that is asked for each
            equation of the linearized function. None saves nothing but the arguments.
        prevent_cse: whether to keep the compiler from merging the recomputation with
            the first computation, which would undo the saving. A bool, or a pytree of
            bools that is a prefix of the positional arguments that aren't static (where
            there are keyword arguments: of the pair of both). Where it is False no
            barrier is emitted for that argument; only set it where nothing can be
            merged.
        static_argnums: positions of arguments that are Python values rather than data.
            They must be hashable.
        static_argnames: names of such arguments. Either may be passed by position or by
            name.

    Returns:
        A function like `fun`. Its backward pass reads the arguments, and what `fun`
        closes over, again: until then they must not be deleted, donated to another
        call, or changed in place.

    Raises:
        PolicyError: `policy` is not callable, or gave an answer that is no answer.
        StaticArgumentError: a static argument doesn't exist or can't be hashed.
        TracedValueError: `fun` needs the value of an argument that isn't static.
        UnsupportedError: `fun` uses something that can't be recomputed correctly.

    Example:
        >>> import jax, jax.numpy as jnp, remat
        >>> @remat.checkpoint
        ... def layer(w, x):
        ...     return jnp.tanh(jnp.sin(x @ w))
        >>> w, x = jnp.eye(3), jnp.ones((2, 3))
        >>> jax.grad(lambda w: layer(w, x).sum())(w).shape
        (3, 3)
    """
    check_policy(policy)
    if fun is None:
        return partial(
            checkpoint,
            policy=policy,
            prevent_cse=prevent_cse,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise RematError(
            f"remat.checkpoint got {fun!r} of type {type(fun).__name__} to transform, "
            "which is not callable. Pass a function, and its arguments to the function "
            "that comes back: remat.checkpoint(f)(x)."
        )
    spec = static_spec(fun, static_argnums, static_argnames)

    @wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        call, leaves = trace_call(fun, spec, args, kwargs)
        keep_apart = _keep_apart(prevent_cse, call)
        outs = remat_p.bind(
            *call.consts,
            *leaves,
            jaxpr=call.jaxpr,
            policy=policy,
            prevent_cse=keep_apart,
            num_linear=0,
            staged=False,
            check_names=True,
        )
        return jax.tree.unflatten(call.out_tree, outs)

    declare(checkpointed, spec)
    return checkpointed


def _keep_apart(prevent_cse: Any, call: TracedCall) -> tuple[bool, ...]:
    """One bool for each operand of `call`, from a bool or a pytree prefix of bools.

    Closed-over values, which no prefix reaches, are kept apart only by a plain True.
    """
    num_operands = len(call.jaxpr.in_avals)
    if isinstance(prevent_cse, bool):
        return (prevent_cse,) * num_operands
    leaves = range(call.in_tree.num_leaves)
    args, kwargs = jax.tree.unflatten(call.in_tree, leaves)
    args = tuple(x for i, x in enumerate(args) if i not in call.static_positions)
    full = (args, kwargs) if kwargs else args
    prefix = tuple(prevent_cse) if isinstance(prevent_cse, list) else prevent_cse
    try:
        flags = jax.tree.leaves(jax.tree.broadcast(prefix, full))
    except (TypeError, ValueError) as error:
        raise RematError(
            f"remat.checkpoint got prevent_cse={prevent_cse!r}, which is no prefix of "
            "the arguments. Pass True, False, or a tuple with an entry for each "
            "positional argument that isn't static: a bool, or a container of bools "
            "like the argument."
        ) from error
    if not all(isinstance(flag, bool) for flag in flags):
        raise RematError(
            f"remat.checkpoint got prevent_cse={prevent_cse!r}. Pass bools only."
        )
    return (False,) * (num_operands - len(flags)) + tuple(flags)


def checkpoint_name(x: Any, name: str | None = None) -> Any:
    """Return `x`, its arrays named `name` for policies to refer to.

    Args:
        x: any pytree of arrays. Only the primal values are named, not their tangents.
        name: the name, the same for all arrays in `x`.

    Raises:
        NameArgumentError: `name` is missing or no string.
    """
    if name is None:
        raise NameArgumentError(
            "remat.checkpoint_name got no name. Pass the value and then its name, as "
            'in checkpoint_name(x, "x").'
        )
    if not isinstance(name, str):
        raise NameArgumentError(
            f"remat.checkpoint_name got name={shown(name)} of type "
            f"{type(name).__name__}. Pass the value and then its name as a string: "
            'checkpoint_name(x, "x").'
        )
    for leaf in jax.tree.leaves(x):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise NameArgumentError(
                f"remat.checkpoint_name got {shown(leaf)} of type "
                f"{type(leaf).__name__} in x, to be named {name!r}. Only arrays, and "
                "containers of arrays, can be named."
            ) from None
    return jax.tree.map(lambda leaf: name_p.bind(leaf, name=name), x)
