"""Compilation by `torch.compile`: choosing the parts of a task to compile, and reverting them.

Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS 2024.

A module's forward is compiled, not its call, so that hooks run outside of the compiled code. Inside, the
hooks that gather a block's parameters would break the graph in two. Each run has one compiled function per
class that takes the module as an argument. So ten equal blocks are compiled once, and dropping the function
frees everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.validation import by_name, check_names, flag, one_of
from drivetrain.data.batch import map_tensors
from drivetrain.strategies.base import Strategy, check_supported
from drivetrain.task.blocks import is_called, repeated_blocks

SCOPES = ("blocks", "task")
"""The values of `CompileConfig.scope`."""

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The values of `CompileConfig.mode`, which are those of `torch.compile`."""

_WITH_GRAPHS = ("reduce-overhead", "max-autotune")


@by_name
@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Options of compilation; all but `scope` are those of `torch.compile`.

    Attributes:
        scope: The unit of compilation. "blocks" compiles each repeated block of a list of modules, once per
            class; a task without such blocks is compiled as with "task". "task" compiles the whole forward,
            or, if the task has none, that of each child module. A loss is compiled by its own decorator,
            `@torch.compile`.
        mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs"; None means
            "default".
        dynamic: Whether the compiled code accepts changing sizes. True accepts all. False compiles each size
            separately. None accepts changes of the first dimension, which is the number of samples, and of
            any other that turns out to change.
        backend: The backend's name, or a function of a graph and example inputs.
        fullgraph: Raise an error if a part cannot be compiled.
        options: Options of the backend.

    Raises:
        ConfigError: The scope, mode, backend or a backend's option is unknown; the message gives the nearest.
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
            raise ConfigError(f"CompileConfig(options=...) must be a mapping, not {self.options!r}")
        if self.mode is not None:
            raise ConfigError("CompileConfig takes mode or options, not both: a mode is a set of options")
        if self.backend == "inductor":
            known = torch._inductor.list_options()
            check_names("torch.compile's inductor", (each.replace("-", "_") for each in self.options), known)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile`."""
        return {
            "mode": self.mode,
            "dynamic": self.dynamic,
            "backend": self.backend,
            "fullgraph": self.fullgraph,
            "options": None if self.options is None else dict(self.options),
        }


def as_compile(spec: bool | Mapping[str, Any] | CompileConfig) -> CompileConfig | None:
    """Return a user's `compile` argument as a configuration; None if compilation is off."""
    if isinstance(spec, CompileConfig):
        return spec
    if isinstance(spec, Mapping):
        config = CompileConfig(**{name: value for name, value in spec.items() if name != "disable"})
        return None if spec.get("disable") else config
    return CompileConfig() if flag("compile, if no mapping or CompileConfig(mode=...),", spec) else None


def check_compile(spec: bool | Mapping[str, Any] | CompileConfig, strategy: Strategy) -> CompileConfig | None:
    """Return the result of `as_compile`, checked against the strategy."""
    config = as_compile(spec)
    if config is None:
        return None
    check_supported(strategy, "compile", f"compile={spec!r}", "Use compile=False")
    if strategy.sharded and config.scope != "blocks":
        raise StrategyError(
            f"compile scope {config.scope!r} with strategy {strategy.name!r}: it gathers parameters before"
            " each block, in the middle of the code that would be compiled as one. Use scope='blocks'"
        )
    return config


class Compilation:
    """The compiled parts of one run.

    Attributes:
        parts: The number of compiled modules by the name of their class.
    """

    def __init__(self, spec: bool | Mapping[str, Any] | CompileConfig, strategy: Strategy) -> None:
        self._config = check_compile(spec, strategy)
        self._functions: dict[type[nn.Module], Callable[..., Any]] = {}
        self._installed: list[Compiled] = []
        self.parts: dict[str, int] = {}

    def add(self, model: nn.Module) -> None:
        """Install compiled forwards, which compile when first called. Call it before sharding or wrapping.

        Modules that the user has compiled, and modules that contain them, are left alone.
        """
        if self._config is None:
            return
        names = {id(module): name for name, module in model.named_modules()}
        for module in self._modules(model):
            # A forward set on the instance cannot share its class's compiled function.
            if not _has_own_forward(module) and not any(map(_is_compiled, module.modules())):
                self._install(module, names[id(module)] or type(module).__name__)

    def _modules(self, model: nn.Module) -> list[nn.Module]:
        assert self._config is not None
        blocks = repeated_blocks(model, tied=True) if self._config.scope == "blocks" else []
        if blocks:
            return list({id(each): each for each in blocks}.values())
        if type(model).forward is not nn.Module.forward:
            return [model]
        return [each for each in model.children() if is_called(each)]

    def _install(self, module: nn.Module, name: str) -> None:
        assert self._config is not None
        kind = type(module)
        if kind not in self._functions:
            function = _function(f"{kind.__name__}_forward")
            self._functions[kind] = torch.compile(function, **self._config.arguments())
        compiled = Compiled(module, name, self._functions[kind], self._config)
        self._installed.append(compiled)
        self.parts[kind.__name__] = self.parts.get(kind.__name__, 0) + 1

    def marking(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a step that marks for CUDA graphs where it begins, and whose results are no outputs of one.

        The next replay of a graph overwrites its outputs. A loss is kept until the next log point, and
        outputs by metrics that collect them. Without the mark each call of a compiled block would count as a
        step of its own. A configuration without graphs returns the step itself.
        """
        if self._config is None or not makes_graphs(self._config):
            return step

        def run(batch: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return map_tensors(Tensor.clone, step(batch))

        return run

    def release(self) -> None:
        """Revert all modules, and drop the compiled code."""
        for each in self._installed:
            each.remove()
        self._installed, self._functions = [], {}


def makes_graphs(config: CompileConfig) -> bool:
    """Return whether a configuration captures CUDA graphs."""
    options = config.options or {}
    return config.mode in _WITH_GRAPHS or bool(options.get("triton.cudagraphs"))


class Replacement:
    """A forward that replaces a module's original one.

    The forward is replaced, not the call, so that hooks on the module run once and names do not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, vars(module).get("forward")
        self._forward = module.forward
        vars(module)["forward"] = self

    def remove(self) -> None:
        """Revert the module."""
        if vars(self._module).get("forward") is self:
            del vars(self._module)["forward"]
            if self._own is not None:
                vars(self._module)["forward"] = self._own

    def __reduce__(self) -> Any:
        # A copy of the module is an ordinary one; otherwise it would compute with this one's parameters.
        return getattr, (self._module, "forward")


class Compiled(Replacement):
    """A compiled forward that replaces a module's original one."""

    def __init__(
        self, module: nn.Module, name: str, function: Callable[..., Any], config: CompileConfig
    ) -> None:
        super().__init__(module)
        self._name = name
        self._function = function
        self._config = config
        self._around: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._config.dynamic is None:
            _leave_open((args, kwargs), None)
        try:
            return self._function(self._module, self._around, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ConfigError(
                f"{self._name!r} ({type(self._module).__name__}.forward) could not be compiled:"
                f" {_cause(error)}. compile=False runs without compilation, and shows whether the model"
                " itself is at fault; fullgraph=False runs uncompiled what cannot be compiled, scope='blocks'"
                " compiles less, and backend='aot_eager' shows whether it is the backend"
            ) from error

    def recompute(self, again: Callable[..., Any]) -> None:
        """Recompute activations in backward, inside the compiled code.

        From outside, the operations within the compiled code could not be told apart.
        """
        self._around = again


def compiled_forward(module: nn.Module) -> Compiled | None:
    """Return a module's compiled forward; None if it is not compiled."""
    found = vars(module).get("forward")
    return found if isinstance(found, Compiled) else None


def _has_own_forward(module: nn.Module) -> bool:
    """Return whether a module's forward is not its class's; a copy of a compiled module has its class's."""
    found = vars(module).get("forward")
    if isinstance(found, MethodType) and found.__self__ is module:
        return found.__func__ is not type(module).forward
    return found is not None


def _run(module: nn.Module, around: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    function = type(module).forward
    if around is None:
        return function(module, *args, **kwargs)
    return around(function, (module, *args), kwargs)


def _function(name: str) -> Callable[..., Any]:
    """Return a copy of `_run` with a separate code object, which torch attaches the compiled code to."""
    code: CodeType = _run.__code__.replace(co_name=name, co_qualname=name)
    return FunctionType(code, globals(), name)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether the user has compiled a module."""
    return (
        isinstance(module, torch._dynamo.OptimizedModule)
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def _leave_open(value: Any, size: int | None) -> int | None:
    """Mark the first dimension of each input as dynamic, if it has the same size as that of the first input.

    torch itself notices a dynamic dimension only at the first change, and then recompiles for all sizes. A
    resumed run that has not seen the change yet would run other code, and differ in its last bits.
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
    """Return torch's message up to the first empty line; after that it addresses its own developers."""
    text = " ".join(str(error).strip().partition("\n\n")[0].split()) or type(error).__name__
    return text.rstrip(".:") if len(text) < 500 else f"{text[:500]}..."
