"""`@workflow` and `Workflow`: a function, seen as something that can be run durably.

A Workflow knows its name, its function, and how its arguments and result are checked and rebuilt. The worker runs it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import textwrap
import typing
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeAlias, TypeVar, TypeVarTuple, Unpack, overload

from perdure.aio.loop_thread import block_on
from perdure.aio.own_tasks import current
from perdure.body.body_queue import BodyQueue
from perdure.codec import Codec
from perdure.codec.outcomes import Hints
from perdure.context import Context, full_key
from perdure.ctx_calls.children import child_call, run_child
from perdure.ctx_calls.compensation import closing_of
from perdure.engine.drive import Drive
from perdure.errors import InvalidInput, ValueNotStorable
from perdure.model.ids import check_id, random_bytes
from perdure.model.records import NewInput, check_version
from perdure.model.retention import Retention, check_retention
from perdure.options import RunOptions, WorkflowOptions, check_options
from perdure.result import Err, Ok, Outcome
from perdure.run import Run
from perdure.snapshots.importer import Arguments
from perdure.stepspec import check_aliases, module_of, name_caller, split_result
from perdure.worker.single_run import call_in_memory, run_once, start_once
from perdure.worker.workflow_body import WorkflowInput

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
D = TypeVar("D")
Ts = TypeVarTuple("Ts")


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


# Steps that the code no longer has; in a mapping with the function that undoes each, or None if nothing is to be undone.
Retired: TypeAlias = Collection[str] | Mapping[str, Callable[..., Any] | None]


class Workflow(Generic[P, T_co]):
    """A durable function. Call it, `run` it with an id and a store, or give it to a `Runtime`."""

    is_perdure_workflow: Final = True

    def __init__(
        self,
        name: str,
        fn: Callable[Concatenate[Context[Any], P], Coroutine[Any, Any, T_co]],
        *,
        version: int = 1,
        aliases: Sequence[str] = (),
        retired: Retired = (),
        retention: Retention | None = None,
        **options: Unpack[WorkflowOptions],
    ) -> None:
        if not inspect.iscoroutinefunction(fn):
            raise TypeError(f"a workflow is an async function: write `async def {getattr(fn, '__name__', name)}(ctx, ...)`")
        self.name = check_id(name, "a workflow's name")
        self.version = check_version(version)
        self.aliases = check_aliases(aliases)
        self.retired = _check_retired(retired)
        self.retention = check_retention(retention)
        self.fn = fn
        self.process_options = check_options(options, WorkflowOptions)
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", name)
        self.__wrapped__ = fn
        self._signature = _payload_signature(fn)
        # The fast path: where all parameters are plain, positional arguments go to them one by one, at least `_fewest` of them.
        self._plain, self._fewest = _plain_parameters(self._signature)
        self._annotations = _annotations(fn)
        parameters = [self._annotations.get(each, Any) for each in self._signature.parameters]
        self._input_hint: Any = tuple[tuple(parameters)] if parameters else Any  # type: ignore[misc]  # made at run time
        self.definition_hash = definition_hash(fn)
        self.hints = Hints(*split_result(self._annotations.get("return", Any)), module_of(fn))

    def __repr__(self) -> str:
        return f"<Workflow {self.name}>" if self.version == 1 else f"<Workflow {self.name} version {self.version}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T_co]:
        """Run it here and now, in memory: the value, or the exception. In the body of a workflow, run it as a child.

        The key of the child is the workflow's name; a second one needs `ctx.child(wf, ..., key=)`.
        """
        here = current.get()
        if isinstance(here, BodyQueue) and here.drive is not None:
            return run_child(here.drive, child_call(self, args, kwargs, full_key((), self.name), {}))
        positional, named = self.check_arguments(Codec(), args, kwargs)
        return call_in_memory(self, tuple(positional), named)

    @overload
    async def run(
        self: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        *args: Unpack[Ts],
        **options: Unpack[RunOptions],
    ) -> Outcome[T]: ...
    @overload
    async def run(
        self: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]], *args: Unpack[Ts], **options: Unpack[RunOptions]
    ) -> Outcome[T]: ...
    @overload
    async def run(self: Workflow[P, Ok[T] | Err[Any]], *args: P.args, **kwargs: P.kwargs) -> Outcome[T]: ...
    @overload
    async def run(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T_co]: ...
    async def run(self, *args: Any, **options: Any) -> Outcome[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """The outcome of a run that is driven here until it ends or suspends. With `id=` and `store=` it survives this process.

        The same id with the same input is the same run: it goes on, or gives its outcome. Every keyword is an option; arguments
        are positional, or use `wf.options(id=...).run(...)`.
        """
        return await run_once(self, args, {}, check_options(options, RunOptions))

    @overload
    async def start(
        self: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        *args: Unpack[Ts],
        **options: Unpack[RunOptions],
    ) -> Run[T]: ...
    @overload
    async def start(
        self: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]], *args: Unpack[Ts], **options: Unpack[RunOptions]
    ) -> Run[T]: ...
    @overload
    async def start(self: Workflow[P, Ok[T] | Err[Any]], *args: P.args, **kwargs: P.kwargs) -> Run[T]: ...
    @overload
    async def start(self, *args: P.args, **kwargs: P.kwargs) -> Run[T_co]: ...
    async def start(self, *args: Any, **options: Any) -> Run[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """A new run, driven in the background of this process; without `id=` and `store=`, in memory."""
        return Run(*await start_once(self, args, {}, check_options(options, RunOptions)))

    @overload
    def run_sync(
        self: Callable[[Unpack[Ts]], Coroutine[Any, Any, Ok[T] | Err[Any]]],
        *args: Unpack[Ts],
        **options: Unpack[RunOptions],
    ) -> Outcome[T]: ...
    @overload
    def run_sync(
        self: Callable[[Unpack[Ts]], Coroutine[Any, Any, T]], *args: Unpack[Ts], **options: Unpack[RunOptions]
    ) -> Outcome[T]: ...
    @overload
    def run_sync(self: Workflow[P, Ok[T] | Err[Any]], *args: P.args, **kwargs: P.kwargs) -> Outcome[T]: ...
    @overload
    def run_sync(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T_co]: ...
    def run_sync(self, *args: Any, **options: Any) -> Outcome[Any]:  # type: ignore[misc]  # mypy holds ** against required arguments
        """`run` for programs without an event loop: blocks until the run ends or suspends."""
        return block_on(run_once(self, args, {}, check_options(options, RunOptions)), name_caller())

    @overload
    def options(self: Workflow[P, Ok[T] | Err[Any]], **options: Unpack[RunOptions]) -> Configured[P, T]: ...
    @overload
    def options(self, **options: Unpack[RunOptions]) -> Configured[P, T_co]: ...
    def options(self, **options: Any) -> Configured[P, Any]:
        """This workflow with options set, so that `run` and `start` take its own arguments, keywords included."""
        return Configured(self, check_options(options, RunOptions))

    def body(self, drive: Drive, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Coroutine[Any, Any, Any]:
        """The function at work on one attempt of a run."""
        drive.encode_input = partial(self._new_input, drive.codec)
        closing_of(drive)
        context: Context[Any] = Context(drive)
        call: Callable[..., Coroutine[Any, Any, Any]] = self.fn
        return call(context, *args, **kwargs)

    def check_arguments(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as the function would take them, checked against the annotations. Raises `InvalidInput`."""
        try:
            if not kwargs and self._fewest <= len(args) <= len(self._plain):
                return [self._check_value(codec, name, value) for name, value in zip(self._plain, args, strict=False)], {}
            bound = self._bind(args, kwargs)
            for name, value in bound.arguments.items():
                bound.arguments[name] = self._check_argument(codec, name, value)
        except ValueError as reason:
            raise InvalidInput(self.name, str(reason)) from reason
        return list(bound.args), bound.kwargs

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        try:
            return self._signature.bind(*args, **kwargs)
        except TypeError as reason:
            raise InvalidInput(self.name, str(reason)) from None

    def encode_input(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> WorkflowInput:
        """The arguments checked against the annotations and encoded. Raises `InvalidInput`."""
        given = [*self.check_arguments(codec, args, kwargs)]
        try:
            encoded, kept = codec.dump(given, self._input_hint, path="input")
        except ValueNotStorable as reason:
            raise InvalidInput(self.name, str(reason)) from reason
        digest = codec.digest(given) or hashlib.blake2b(encoded, digest_size=16).digest()
        return WorkflowInput(encoded, digest, Arguments(tuple(kept[0]), kept[1]))

    def _new_input(self, codec: Codec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NewInput:
        """What a run starts over with, in this code. Raises `InvalidInput`."""
        encoded, digest, _ = self.encode_input(codec, args, kwargs)
        return NewInput(input=encoded, input_hash=digest, seed=random_bytes(), definition_hash=self.definition_hash)

    def decode_input(self, codec: Codec, encoded: bytes) -> Arguments:
        """The arguments of a stored run. Raises ValueError."""
        match codec.load(encoded, self._input_hint):
            case [list() as args, dict() as kwargs]:
                return Arguments(tuple(args), kwargs)
        raise ValueError("it is not a list of arguments and a dict of keyword arguments")

    def _check_argument(self, codec: Codec, name: str, value: Any) -> Any:
        kind = self._signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            return tuple(self._check_value(codec, name, each) for each in value)
        if kind is inspect.Parameter.VAR_KEYWORD:
            return {key: self._check_value(codec, name, each) for key, each in value.items()}
        return self._check_value(codec, name, value)

    def _check_value(self, codec: Codec, name: str, value: Any) -> Any:
        try:
            return codec.conform(value, self._annotations.get(name, Any))
        except ValueError as reason:
            raise ValueError(f"{name}: {reason}") from reason


class Configured(Generic[P, T_co]):
    """A workflow with options."""

    def __init__(self, workflow: Workflow[P, Any], options: dict[str, Any]) -> None:
        self._workflow = workflow
        self._options = options

    async def run(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T_co]:
        """As `Workflow.run`, with the arguments of the function."""
        return await run_once(self._workflow, args, kwargs, self._options)

    async def start(self, *args: P.args, **kwargs: P.kwargs) -> Run[T_co]:
        """As `Workflow.start`, with the arguments of the function."""
        return Run(*await start_once(self._workflow, args, kwargs, self._options))

    def run_sync(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[T_co]:
        """As `Workflow.run_sync`, with the arguments of the function."""
        return block_on(run_once(self._workflow, args, kwargs, self._options), name_caller())


@overload
def workflow(fn: Callable[Concatenate[Context[D], P], Coroutine[Any, Any, T]], /) -> Workflow[P, T]: ...
@overload
def workflow(
    *,
    name: str | None = None,
    version: int = 1,
    aliases: Sequence[str] = (),
    retired: Retired = (),
    retention: Retention | None = None,
    **options: Unpack[WorkflowOptions],
) -> Callable[[Callable[Concatenate[Context[D], P], Coroutine[Any, Any, T]]], Workflow[P, T]]: ...
def workflow(fn: Any = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Make an async function whose first parameter is a `Context` a `Workflow`, named after the function or by `name=`.

    A run goes on in the `version` in which it was started; a `Runtime` takes several versions of one name. `aliases` are former
    names, whose runs go on here; `retired` names recorded steps that the code no longer has; as a mapping
    it also says how each is undone if the run fails or is cancelled (None: not at all). `retention` says for how long ended
    runs are kept, before that of the `Runtime`.
    """

    def make(function: Any) -> Workflow[Any, Any]:
        if not callable(function):
            raise TypeError(f"@workflow decorates a function, not {function!r}; a name is given as @workflow(name=...)")
        default = str(getattr(function, "__name__", type(function).__name__))
        return Workflow(default if name is None else name, function, **options)

    return make if fn is None else make(fn)


def _check_retired(retired: Any) -> Retired:
    if isinstance(retired, str) or not isinstance(retired, Collection):
        raise TypeError(f"retired= takes the names of steps that the code no longer has: {{{retired!r}}}")
    names = [check_id(name, "a retired step") for name in retired]
    if not isinstance(retired, Mapping):
        return frozenset(names)
    for name, compensate in retired.items():
        if compensate is not None and not callable(compensate):
            raise TypeError(
                f"retired= maps the name of a step to the function that undoes it, or None; not {name!r} to {compensate!r}"
            )
    return dict(retired)


def _plain_parameters(signature: inspect.Signature) -> tuple[list[str], int]:
    """The names of the parameters and how many have no default; `([], 1)`, which nothing fits, where some are not plain."""
    parameters = signature.parameters.values()
    if not all(each.kind in _POSITIONAL for each in parameters):
        return [], 1
    return [each.name for each in parameters], sum(each.default is inspect.Parameter.empty for each in parameters)


def _payload_signature(fn: Callable[..., Any]) -> inspect.Signature:
    """The function's signature without its first parameter, the Context."""
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise TypeError(f"the first parameter of workflow {getattr(fn, '__name__', fn)!r} must be its Context: (ctx, ...)")
    clash = [
        each.name
        for each in parameters
        if each.kind is inspect.Parameter.KEYWORD_ONLY and each.name in RunOptions.__annotations__
    ]
    if clash:
        raise TypeError(f"the keyword-only parameter {clash[0]!r} has the name of an option of run(); give it another name")
    return inspect.Signature(parameters[1:])


def _annotations(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except Exception:  # noqa: BLE001 - an annotation may raise anything; then there is nothing to check against
        return {}


# The version of this way of hashing: hashes of different versions are not compared.
SCHEME: Final = "ast1:"
# How often a source is parsed when that fails; bounded, because a SystemError may have another reason.
_ATTEMPTS_TO_PARSE: Final = 100


def definition_hash(fn: Callable[..., Any]) -> str | None:
    """The hash of the function's code without docstrings and decorators; None when its source cannot be read."""
    try:
        tree = _parse(textwrap.dedent(inspect.getsource(fn)))
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []
    return SCHEME + hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:32]


def _parse(source: str) -> ast.Module:
    """Return the syntax tree of the source, whatever other code makes syntax trees meanwhile.

    Up to Python 3.11.7 and 3.12.1 all threads count the depth of their trees in one place (gh-106905). A garbage collection in
    `ast.parse` may run a finalizer that makes a tree too, as printing a traceback does. `ast.parse` raises SystemError then. A
    finalizer runs once, so another attempt succeeds.
    """
    for _ in range(_ATTEMPTS_TO_PARSE - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)
