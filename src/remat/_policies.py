"""Policies: which values a rematerialized function saves for its backward pass.

A policy is any callable `policy(prim, *avals, **params) -> bool` that is asked, for
each equation of the linearized function, whether its results may be saved. What it
allows is saved only where the backward pass needs it. The predefined policies are
frozen dataclasses, so that they can be compared, hashed and printed.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.ad_checkpoint import Offloadable, Recompute, Saveable
from jax.extend.core import Primitive
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from remat._errors import NameArgumentError, PolicyError
from remat._jax import JaxprEqn, name_p, side_effects

Policy = Callable[..., Any]


@dataclass(frozen=True)
class EverythingSaveable:
    """Save whatever the backward pass needs, as if there were no checkpoint."""

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> bool:
        del prim, avals, params
        return True

    def __repr__(self) -> str:
        return "everything_saveable"


@dataclass(frozen=True)
class NothingSaveable:
    """Save nothing but the operands; the same as no policy."""

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> bool:
        del prim, avals, params
        return False

    def __repr__(self) -> str:
        return "nothing_saveable"


@dataclass(frozen=True)
class DotsSaveable:
    """Save the results of products, and of convolutions unless `batch_dims` is False.

    With `batch_dims` False only products without batch dimensions are saved: those of
    activations with weights, but not those of attention, as JAX's policy of that name
    has it.
    """

    batch_dims: bool

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> bool:
        if prim is dot_general_p:
            _, (lhs_batch, rhs_batch) = params["dimension_numbers"]
            return self.batch_dims or not (lhs_batch or rhs_batch)
        if prim.name == "scaled_matmul_wrapper":  # jax.nn.scaled_matmul, not public
            return self.batch_dims or avals[0].shape[0] == 1
        return self.batch_dims and prim is conv_general_dilated_p

    def __repr__(self) -> str:
        if self.batch_dims:
            return "dots_saveable"
        return "dots_with_no_batch_dims_saveable"


@dataclass(frozen=True)
class SaveOnlyTheseNames:
    """Save the values that `checkpoint_name` gave one of `names`, and no others."""

    names: frozenset[str]

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> bool:
        del avals
        return prim is name_p and params["name"] in self.names

    def __repr__(self) -> str:
        return f"save_only_these_names({_quoted(self.names)})"


@dataclass(frozen=True)
class SaveAnyNamesButThese:
    """Save every value named by `checkpoint_name`, except those in `names`."""

    names: frozenset[str]

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> bool:
        del avals
        return prim is name_p and params["name"] not in self.names

    def __repr__(self) -> str:
        return f"save_any_names_but_these({_quoted(self.names)})"


@dataclass(frozen=True)
class SaveFromBothPolicies:
    """Save what either of two policies saves."""

    first: Policy
    second: Policy

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> bool:
        return any(
            is_saveable(policy, policy(prim, *avals, **params))
            for policy in (self.first, self.second)
        )

    def __repr__(self) -> str:
        return f"save_from_both_policies({self.first!r}, {self.second!r})"


everything_saveable = EverythingSaveable()
nothing_saveable = NothingSaveable()
dots_saveable = checkpoint_dots = DotsSaveable(batch_dims=True)
dots_with_no_batch_dims_saveable = checkpoint_dots_with_no_batch_dims = DotsSaveable(
    batch_dims=False
)


def save_only_these_names(*names: str) -> SaveOnlyTheseNames:
    """A policy that saves only the values named one of `names`.

    A name that occurs nowhere in the function raises an `UnknownNameWarning` when the
    function is differentiated.

    Raises:
        NameArgumentError: a name is no string.
    """
    return SaveOnlyTheseNames(_checked(names, "save_only_these_names"))


def save_any_names_but_these(*names: str) -> SaveAnyNamesButThese:
    """A policy that saves every named value except those named one of `names`.

    Raises:
        NameArgumentError: a name is no string.
    """
    return SaveAnyNamesButThese(_checked(names, "save_any_names_but_these"))


def save_from_both_policies(first: Policy, second: Policy) -> SaveFromBothPolicies:
    """A policy that saves what `first` or `second` saves.

    Raises:
        PolicyError: one of them is not callable.
    """
    check_policy(first, "first")
    check_policy(second, "second")
    return SaveFromBothPolicies(first, second)


def check_policy(policy: object, position: str | None = None) -> None:
    """Raise unless `policy` is something that can be asked.

    The factories (`save_only_these_names` and its like) are callable, so passing one
    uncalled would otherwise only fail deep inside a trace.

    Args:
        policy: what was passed, to `checkpoint` or to `save_from_both_policies`.
        position: to which argument of the latter. The former may also have none.

    Raises:
        PolicyError: it is no policy, or can't be hashed.
    """
    if position is None:
        start, end, keyword = "remat.checkpoint got policy=", "", "policy="
        if policy is None:
            return
    else:
        start, end = "save_from_both_policies got ", f" as its {position} policy"
        keyword = ""
    factories = {
        save_only_these_names: '("name")',
        save_any_names_but_these: '("name")',
        save_from_both_policies: "(first, second)",
    }
    for factory, arguments in factories.items():
        if policy is factory:
            name = factory.__name__
            raise PolicyError(
                f"{start}{name}{end}, which makes a policy but is none itself. Call "
                f"it: {keyword}remat.policies.{name}{arguments}."
            )
    if isinstance(policy, type):
        raise PolicyError(
            f"{start}{policy.__name__}{end}, which is a class. Pass an instance of it."
        )
    if not callable(policy):
        function = "a function policy(prim, *avals, **params) -> bool"
        accepted = (
            f"Pass a policy from remat.policies or {function}."
            if position
            else f"Pass a policy from remat.policies, {function}, or None to save "
            "nothing."
        )
        hint = (
            f" To save the values with that name, pass {keyword}"
            f"remat.policies.save_only_these_names({policy!r})."
            if isinstance(policy, str) and not position
            else ""
        )
        raise PolicyError(
            f"{start}{policy!r}{end}, which is not callable. {accepted}{hint}"
        )
    try:
        inspect.signature(policy).bind(dot_general_p, None, None, a_parameter=None)
    except TypeError:
        raise PolicyError(
            f"{start}{policy!r}{end}, which doesn't take what policies are asked with: "
            "a primitive, the types of its operands and its parameters. Give it the "
            "signature policy(prim, *avals, **params)."
        ) from None
    except ValueError:  # builtins may have no signature
        pass
    try:
        hash(policy)
    except TypeError:
        raise PolicyError(
            f"{start}{policy!r}{end}, which can't be hashed, but what is derived by a "
            "policy is kept under it. Make its class a frozen dataclass "
            "(@dataclass(frozen=True)), or give it a __hash__ that agrees with its "
            "__eq__."
        ) from None


def is_saveable(policy: Policy, answer: object) -> bool:
    """Read what `policy` answered: a bool, or one of JAX's marks.

    Raises:
        PolicyError: the answer is anything else.
    """
    if isinstance(answer, bool | np.bool_):
        return bool(answer)
    if answer is Saveable:
        return True
    if answer is Recompute:
        return False
    if isinstance(answer, Offloadable) or answer is Offloadable:
        raise PolicyError(
            f"The policy {policy!r} answered {answer!r}, but remat does not offload "
            "residuals to the host yet. Use a policy that saves or recomputes: for "
            "instance remat.policies.save_only_these_names with the names it offloads."
        )
    raise PolicyError(
        f"The policy {policy!r} answered {answer!r}, which is neither a bool nor one "
        "of jax.ad_checkpoint.Saveable and Recompute. Return True for an equation "
        "whose results may be saved and False for one to recompute."
    )


def asks(policy: Policy, eqn: JaxprEqn) -> bool:
    """Whether `policy` lets the results of `eqn` be saved.

    What has an effect is saved, since it must not happen a second time.
    """
    if side_effects(eqn):
        return True
    avals = [v.aval for v in eqn.invars]
    return is_saveable(policy, policy(eqn.primitive, *avals, **eqn.params))


def saved_names(policy: Policy | None) -> frozenset[str]:
    """The names that `policy` expects to find, so that a typo can be told."""
    match policy:
        case SaveOnlyTheseNames(names):
            return names
        case SaveFromBothPolicies(first, second):
            return saved_names(first) | saved_names(second)
        case _:
            return frozenset()


def _checked(names: Iterable[object], factory: str) -> frozenset[str]:
    checked = set()
    for name in names:
        if not isinstance(name, str):
            hint = (
                " Pass the names one by one, as in *names."
                if isinstance(name, list | tuple | set | frozenset)
                else ""
            )
            raise NameArgumentError(
                f"{factory} got the name {name!r} of type {type(name).__name__}; "
                f"names are strings, as given to remat.checkpoint_name.{hint}"
            )
        checked.add(name)
    return frozenset(checked)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
