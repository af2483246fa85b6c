"""Compilation by `torch.compile`: what of a task is compiled, and making it an ordinary module again.

Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS 2024.

The forward of a module is compiled, and not its call, so that hooks run around what is compiled: those with
which a strategy gathers a block's parameters would break its graph in two. Each class has one compiled
function of a run's own, to which a module is an argument, so that ten equal blocks are compiled once, and
nothing is left when the function is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drivetrain.blocks import is_called, repeated_blocks
from drivetrain.errors import ConfigError, StrategyError
from drivetrain.forwards import read_forward
from drivetrain.options import by_name, check_names, flag, one_of
from drivetrain.task import TaskModule

if TYPE_CHECKING:
    from drivetrain.strategies.base import Strategy

SCOPES = ("blocks", "task", "step")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@by_name
@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """How a task is compiled; see `torch.compile`, whose names the others are.

    Attributes:
        scope: What is compiled by itself. "blocks": each of the repeated blocks of a list of modules, of
            which a class is compiled once; of a task without any, all of its forward. "task": all of its
            forward, or, where it has none, that of each of its submodules. "step": the training step, which
            is forward and loss, and the steps of evaluation and prediction; not the backward's end, nor the
            update.
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs"; None for the
            first.
        dynamic: Whether sizes are left open in what is compiled: True for all, False for none, so that each
            size is compiled anew. None leaves the first dimension open, which is the number of samples, and
            any other that turns out to change.
        backend: Its name, or a function of a graph and example inputs.
        fullgraph: Whether it is an error that a part cannot be compiled.
        options: What the backend is told.

    Raises:
        ConfigError: An unknown scope, mode, backend or option of the backend's; names the nearest.
    """

    scope: str = "blocks"
    mode: str | None = None
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    fullgraph: bool = False
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check each option."""
        one_of("scope of compilation", self.scope, SCOPES)
        if self.mode is not None:
            one_of("mode of torch.compile", self.mode, MODES)
        if self.dynamic is not None:
            flag("CompileConfig(dynamic=...), unless it is None,", self.dynamic)
        flag("CompileConfig(fullgraph=...)", self.fullgraph)
        if self.backend != "inductor" and not callable(self.backend):
            from torch._dynamo import list_backends

            one_of("backend of torch.compile", self.backend, list_backends(exclude_tags=()))
        if self.options is None:
            return
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"CompileConfig(options=...) is a mapping, not {self.options!r}")
        if self.mode is not None:
            raise ConfigError("CompileConfig takes mode or options, not both: a mode is a set of options")
        if self.backend == "inductor":
            known = torch._inductor.list_options()
            check_names("torch.compile's inductor", (each.replace("-", "_") for each in self.options), known)

    def arguments(self) -> dict[str, Any]:
        """What `torch.compile` is given."""
        return {
            "mode": self.mode,
            "dynamic": self.dynamic,
            "backend": self.backend,
            "fullgraph": self.fullgraph,
            "options": None if self.options is None else dict(self.options),
        }


def as_compile(spec: bool | Mapping[str, Any] | CompileConfig) -> CompileConfig | None:
    """What a user wrote, as a configuration; None where nothing is to be compiled.

    Raises:
        ConfigError: It is no such thing; says what is.
    """
    if isinstance(spec, CompileConfig):
        return spec
    if isinstance(spec, Mapping):
        names = [each.name for each in fields(CompileConfig)]
        check_names("compile", spec, [*names, "disable"])
        config = CompileConfig(**{name: value for name, value in spec.items() if name != "disable"})
        return None if spec.get("disable") else config
    return CompileConfig() if flag("compile (unless it is a CompileConfig or a mapping)", spec) else None


def check_compile(spec: bool | Mapping[str, Any] | CompileConfig, strategy: Strategy) -> CompileConfig | None:
    """As `as_compile`, for a strategy.

    Raises:
        ConfigError: It is no such thing; says what is.
        StrategyError: The strategy's models cannot be compiled, or not as one; says why.
    """
    config = as_compile(spec)
    if config is not None and strategy.sharded and config.scope != "blocks" and not strategy.no_compile:
        raise StrategyError(
            f"compile scope {config.scope!r} with strategy {strategy.name!r}: it gathers parameters before"
            " each block, in the midst of what would be compiled as one. Use scope='blocks'"
        )
    if config is not None and strategy.no_compile:
        raise StrategyError(
            f"compile={spec!r} with strategy {strategy.name!r}: {strategy.no_compile}. Use compile=False"
        )
    return config


class Compilation:
    """What of one run is compiled.

    Args:
        spec: What was asked for; False for nothing.
        strategy: The run's.

    Attributes:
        parts: What is compiled: numbers of modules by the name of their class.
    """

    def __init__(self, spec: bool | Mapping[str, Any] | CompileConfig, strategy: Strategy) -> None:
        self._config = check_compile(spec, strategy)
        self._functions: dict[tuple[type[nn.Module], str], Callable[..., Any]] = {}
        self._installed: list[Compiled] = []
        self.parts: dict[str, int] = {}

    def add(self, model: nn.Module) -> None:
        """Have a model compiled when it is first called; before it is sharded or wrapped.

        What its user compiles is left alone, and so is what contains that.

        Raises:
            ConfigError: Scope "step" for a model that is no task, or for several optimizers.
        """
        if self._config is None:
            return
        if self._config.scope == "step":
            for method in self._steps(model):
                self._install(model, type(model).__name__, method)
            return
        names = {id(module): name for name, module in model.named_modules()}
        for module in self._modules(model):
            # A forward of the module's own, and not of its class, is nobody else's either.
            if not _has_own_forward(module) and not any(map(_is_compiled, module.modules())):
                self._install(module, names[id(module)] or type(module).__name__, "forward")

    def _steps(self, model: nn.Module) -> Iterator[str]:
        kind = type(model)
        if not isinstance(model, TaskModule):
            raise ConfigError(
                f"scope 'step' compiles the steps of a TaskModule, and {kind.__name__} has none. Use scope"
                " 'task' or 'blocks'"
            )
        read_forward(kind)
        for method in _STEPS:
            if not inspect.isgeneratorfunction(getattr(kind, method)):
                yield method
            elif method == "training_step":
                raise ConfigError(
                    f"{kind.__name__}.training_step is a generator, which cannot be compiled as one with the"
                    " updates that it waits for. Use scope 'task' or 'blocks'"
                )

    def _modules(self, model: nn.Module) -> list[nn.Module]:
        assert self._config is not None
        blocks = repeated_blocks(model, tied=True) if self._config.scope == "blocks" else []
        if blocks:
            return list({id(each): each for each in blocks}.values())
        if type(model).forward is not nn.Module.forward:
            return [model]
        return [each for each in model.children() if is_called(each)]

    def _install(self, module: nn.Module, name: str, method: str) -> None:
        assert self._config is not None
        kind = type(module)
        if (kind, method) not in self._functions:
            function = _function(f"{kind.__name__}_{method}")
            self._functions[kind, method] = torch.compile(function, **self._config.arguments())
        compiled = Compiled(module, method, name, self._functions[kind, method], self._config)
        vars(module)[method] = compiled
        self._installed.append(compiled)
        if method in ("forward", "training_step"):
            self.parts[kind.__name__] = self.parts.get(kind.__name__, 0) + 1

    def release(self) -> None:
        """Make everything an ordinary module again, and drop what was compiled."""
        for each in self._installed:
            each.remove()
        self._installed, self._functions = [], {}


class Compiled:
    """A module's method in compiled form, in the place of its own.

    Args:
        module: Whose.
        method: The method's name.
        name: The module's.
        function: The compiled function of the module's class.
        config: How it was compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        method: str,
        name: str,
        function: Callable[..., Any],
        config: CompileConfig,
    ) -> None:
        self._module = module
        self._method = method
        self._name = name
        self._function = function
        self._config = config
        self._around: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._config.dynamic is None:
            _leave_open((args, kwargs), None)
        try:
            return self._function(self._module, self._method, self._around, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ConfigError(
                f"{self._name!r} ({type(self._module).__name__}.{self._method}) could not be compiled:"
                f" {_cause(error)}. compile=False goes on without, and shows whether the model itself is"
                f" at fault; {self._advice()}"
            ) from error

    def _advice(self) -> str:
        config = self._config
        if config.fullgraph:
            return "fullgraph=False lets what cannot be compiled run as it is"
        if config.scope != "blocks":
            return "scope='blocks' compiles less"
        return "CompileConfig(backend='aot_eager') shows whether it is the backend"

    def recompute(self, again: Callable[..., Any]) -> None:
        """Have activations computed again in backward, within what is compiled: from outside, the operations
        could not be told apart.

        Args:
            again: What calls a function with positional and named arguments to that end.
        """
        self._around = again

    def remove(self) -> None:
        """Give the module its own method back."""
        if vars(self._module).get(self._method) is self:
            del vars(self._module)[self._method]

    def __reduce__(self) -> Any:
        # A copy of the module is not compiled, and above all does not compute with this one's parameters.
        return getattr, (self._module, self._method)


def compiled_forward(module: nn.Module) -> Compiled | None:
    """What stands in the place of a module's forward, if that is compiled."""
    found = vars(module).get("forward")
    return found if isinstance(found, Compiled) else None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is not that of its class; a copy of a compiled one has its class's."""
    found = vars(module).get("forward")
    if isinstance(found, MethodType) and found.__self__ is module:
        return found.__func__ is not type(module).forward
    return found is not None


def _run(module: nn.Module, method: str, around: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    function = getattr(type(module), method)
    if around is None:
        return function(module, *args, **kwargs)
    return around(function, (module, *args), kwargs)


def _function(name: str) -> Callable[..., Any]:
    """`_run` with code of its own, to which torch attaches what it compiles."""
    code: CodeType = _run.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, globals(), name)


def _is_compiled(module: nn.Module) -> bool:
    """Whether its user has compiled a module."""
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def _leave_open(value: Any, size: int | None) -> int | None:
    """Mark the first dimension of the inputs as one that changes, if it has the size of the first's.

    torch alone would find out at the first change, and from then on run another program for the sizes before
    it too: a resumed run, which has not seen the change, would differ in its last bits.
    """
    if isinstance(value, Tensor):
        if value.ndim and (size is None or value.shape[0] == size) and not isinstance(value, nn.Parameter):
            torch._dynamo.maybe_mark_dynamic(value, 0)
            return value.shape[0]
    elif isinstance(value, Mapping):
        for each in value.values():
            size = _leave_open(each, size)
    elif isinstance(value, (tuple, list)):
        for each in value:
            size = _leave_open(each, size)
    return size


def _cause(error: BaseException) -> str:
    """What torch says first, up to an empty line, after which it advises its own developers."""
    text = " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
    return text.rstrip(".:") if len(text) < 500 else f"{text[:500]}..."
