"""The one call: walk over a model, replace what is known exactly, say what stays and why."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stoker_kernels.patching import catalogue, losses
from stoker_kernels.patching.attention import NAME, register_attention
from stoker_kernels.patching.recognition import altered, digest, qualified
from stoker_kernels.patching.report import Applied
from stoker_kernels.patching.selection import Selection
from stoker_kernels.patching.swapping import mixin_of, restore, swap

if TYPE_CHECKING:
    from collections.abc import Iterable

_ATTENTION = "_stoker_config"  # on a module: the config of before, and what ours had at first


def apply(
    model: nn.Module,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    strict: bool = False,
) -> Applied:
    """Run our kernels in ``model``, in place: norms, gates, GELUs, rotary, attention, losses.

    Known are Hugging Face's Llama, Mistral, Mixtral, Qwen2, Qwen3, Gemma 2, GPT-2, GPT-NeoX, Falcon, BERT
    and T5, and ``nn.LayerNorm``, ``nn.RMSNorm``, ``nn.CrossEntropyLoss`` and ``nn.Sequential(Linear, GELU)``
    of any model. Parameters, buffers, hooks and all names stay, so optimizers, checkpoints, adapters, DDP
    and FSDP2 work as before; call it before ``fully_shard`` and ``torch.compile``. ``only`` and ``skip`` name
    kernels (``"attention"``) or modules (``"model.layers.0.*"``). A second call changes nothing, and may not
    choose: ``undo()`` the first one for that. A module that is not exactly what is known stays and is in
    the result's ``left``, with the reason.

    In training with labels a causal language model makes no logits, which raises where they are read;
    ``skip={"linear_cross_entropy"}`` makes them.

    Raises ``ValueError`` for an entry of ``only`` or ``skip`` that names nothing, for a choice on a model
    that has our kernels already, and with ``strict`` for every module that was wanted and is left: the
    model is then unchanged.
    """
    names = {
        name: module for name, module in model.named_modules() if not _within_parametrized(name)
    }
    selection = Selection(only, skip, list(names))
    if (only is not None or skip is not None or strict) and any(map(_has_ours, names.values())):
        raise ValueError(
            "apply: the model has the kernels of an earlier call\n"
            "undo() that one before you choose with only, skip or strict"
        )
    applied, refused = Applied(), []
    attending: list[tuple[str, Any]] = []
    for name, module in names.items():
        refused += _apply_to(name, module, selection, applied, attending)
    refused += _attend(model, attending, selection, applied)
    for name, module in names.items():
        refused += _apply_loss(name, module, names, selection, applied)
    if strict and refused:
        applied.undo()
        listed = "; ".join(f"{name or 'model'}: {why}" for name, why in refused[:3])
        raise ValueError(
            f"apply: {len(refused)} modules stay as they are: {listed}\n"
            "leave strict out, or skip them by name"
        )
    return applied


def _has_ours(module: nn.Module) -> bool:
    return mixin_of(module) is not None or _state_of(module) is not None


def _within_parametrized(name: str) -> bool:
    return ".parametrizations." in f".{name}."


def _apply_to(
    name: str,
    module: nn.Module,
    selection: Selection,
    applied: Applied,
    attending: list[tuple[str, Any]],
) -> list[tuple[str, str]]:
    """Swap one module's class if it is to be; return what was wanted and is refused."""
    kind = getattr(type(module), "_stoker_original", type(module))
    if mixin_of(module) is losses.HeadForward:
        return []
    if mixin_of(module) is not None:
        entry: Any = catalogue.ENTRIES.get(qualified(kind))
        if entry is not None:
            if entry.kernel != "attention":
                applied.note_replaced(name, kind.__name__, entry.kernel, partial(restore, module))
            if entry.attends:
                attending.append((name, module))
        return []
    entry, why = catalogue.find(module)
    if entry is None:
        if not why or why == "-":
            return []
        applied.note_left(name, kind.__name__, why)
        return [(name, why)] if selection.wants(name, "") or selection.only is None else []
    if why == "-":
        return []
    if entry.attends and not why:
        attending.append((name, module))
    if not selection.wants(name, entry.kernel):
        if entry.kernel != "attention":
            applied.note_left(name, kind.__name__, f"{entry.kernel}: not chosen")
        return []
    if not why and entry.mixin is not None:
        why = _quantised(module)
    if why:
        applied.note_left(name, kind.__name__, why)
        return [(name, why)]
    if entry.mixin is not None and entry.kernel != "attention":
        swap(module, entry.mixin)
        applied.note_replaced(name, kind.__name__, entry.kernel, partial(restore, module))
    return []


def _quantised(module: nn.Module) -> str:
    """Return why the tensors of ``module`` itself are none that a kernel takes, or ""."""
    if all(parameter.is_floating_point() for parameter in module.parameters(recurse=False)):
        return ""
    return "its weights are quantised"


def _attend(
    model: nn.Module, attending: list[tuple[str, Any]], selection: Selection, applied: Applied
) -> list[tuple[str, str]]:
    """Have the attention blocks that share a config run our attention, all of them or none."""
    refused = []
    configs = {id(module.config): module.config for _, module in attending}
    for config in configs.values():
        blocks = [(name, module) for name, module in attending if module.config is config]
        why = ""
        if not all(selection.wants(name, "attention") for name, _ in blocks):
            why = "attention: not chosen"
        else:
            why = next(filter(None, (catalogue.why_no_attention(m) for _, m in blocks)), "")
            why = why or _foreign(model, config, {id(m) for _, m in blocks})
            if why:
                refused += [(name, why) for name, _ in blocks]
        if why:
            for name, module in blocks:
                applied.note_left(name, _kind(module).__name__, why)
            continue
        undo = _switch(model, config)
        for name, module in blocks:
            kind = _kind(module)
            entry = catalogue.ENTRIES[qualified(kind)]
            if entry.kernel == "attention" and entry.mixin is not None:
                if mixin_of(module) is None:
                    swap(module, entry.mixin)
                applied.note_replaced(
                    name, kind.__name__, "attention", partial(_own_again, undo, module)
                )
            else:
                applied.note_replaced(name, kind.__name__, "attention", undo)
    # ``generate`` makes a decoder's masks by the whole model's config.
    for module in model.modules():
        config = getattr(getattr(module, "decoder", None), "config", None)
        if getattr(config, "_attn_implementation", "") == NAME and "config" in module.__dict__:
            applied.note_undo(_switch(model, module.config))
    return refused


def _own_again(undo: Any, module: nn.Module) -> None:
    undo()
    restore(module)


def _kind(module: nn.Module) -> type:
    kind: type = getattr(type(module), "_stoker_original", type(module))
    return kind


def _foreign(model: nn.Module, config: Any, known: set[int]) -> str:
    """Return why a config cannot change its attention: a block that is not known has it too."""
    for module in model.modules():
        attends = type(module).__name__.endswith("Attention") and hasattr(module, "scaling")
        if attends and getattr(module, "config", None) is config and id(module) not in known:
            return f"{type(module).__name__} has the same config and is not known"
    return ""


def _switch(model: nn.Module, config: Any) -> Any:
    """Give the modules with ``config`` a copy of it that names our attention; return what undoes that.

    A copy, as other models may hold the same config.
    """
    register_attention()
    holders = [m for m in model.modules() if m.__dict__.get("config") is config]
    if config._attn_implementation != NAME:
        ours = copy.copy(config)
        ours.__dict__["_attn_implementation_internal"] = NAME
        given = config, dict(ours.__dict__)
        for module in holders:
            module.__dict__["config"] = ours
            module.__dict__[_ATTENTION] = given
    return partial(_switch_back, holders)


def _switch_back(holders: list[nn.Module]) -> None:
    """Give the modules the config of before, with what has been set in ours since (a vocabulary's size)."""
    for module in holders:
        given = module.__dict__.pop(_ATTENTION, None)
        if given is None:
            continue
        before, known = given
        for name, value in module.__dict__["config"].__dict__.items():
            if name not in known or known[name] is not value:
                before.__dict__[name] = value
        module.__dict__["config"] = before


def _apply_loss(
    name: str,
    module: Any,
    names: dict[str, nn.Module],
    selection: Selection,
    applied: Applied,
) -> list[tuple[str, str]]:
    """Give a causal language model our loss; return what was wanted and is refused."""
    kind = type(module)
    full = qualified(kind)
    inner = full in catalogue.INNER_LOSSES
    if not (inner or full in catalogue.CAUSAL_MODELS) or not selection.wants(name, "cross_entropy"):
        return []
    undo = partial(_loss_back, module)
    state = _state_of(module)
    if state is not None:
        applied.note_replaced(name, kind.__name__, "cross_entropy", undo)
        head = module.get_output_embeddings()
        if mixin_of(head) is losses.HeadForward:
            back = partial(_head_back, head)
            applied.note_replaced(_name_of(head, names), "Linear", "linear_cross_entropy", back)
        elif state.why:
            applied.note_left(_name_of(head, names), _kind(head).__name__, state.why)
        return []
    why = altered(module) if "forward" in module.__dict__ else ""
    if kind.forward.__module__ != kind.__module__:
        why = "its forward has been patched by somebody"
    if not why:
        why = _why_not_inner(module) if inner else _why_not_usual(module)
    if why:
        applied.note_left(name, kind.__name__, f"cross_entropy: {why}")
        return [(name, why)]
    head = module.get_output_embeddings()
    head_name = _name_of(head, names)
    why = catalogue.CAUSAL_MODELS.get(full, "") or _why_no_head(module, head)
    wanted = selection.wants(head_name, "linear_cross_entropy")
    state = losses.Labels(losses.places(kind), wanted and not why, shifts=not inner)
    state.why = f"linear_cross_entropy: {why}" if wanted and why else ""
    module.__dict__["_stoker_labels"] = state
    if inner:
        module.register_forward_pre_hook(losses.before_inner, with_kwargs=True)
        module.register_forward_hook(losses.after_inner)
    else:
        module.__dict__["_loss_function"] = losses.CausalLoss(state)
        module.register_forward_pre_hook(losses.before_causal, with_kwargs=True)
    applied.note_replaced(name, kind.__name__, "cross_entropy", undo)
    if state.defers:
        swap(head, losses.HeadForward)
        head.__dict__["_stoker_labels"] = state
        applied.note_replaced(
            head_name, "Linear", "linear_cross_entropy", partial(_head_back, head)
        )
    elif wanted:
        applied.note_left(head_name, _kind(head).__name__, state.why)
        return [(head_name, why)]
    return []


def _state_of(module: nn.Module) -> losses.Labels | None:
    state: losses.Labels | None = module.__dict__.get("_stoker_labels")
    return state


def _name_of(head: nn.Module, names: dict[str, nn.Module]) -> str:
    return next((name for name, module in names.items() if module is head), "")


def _why_not_usual(module: Any) -> str:
    from transformers.loss import loss_utils

    function = module.loss_function
    known = function is loss_utils.ForCausalLMLoss
    if known and digest(function) in catalogue.LOSS_DIGESTS:
        return ""
    return "its loss_function is not transformers' ForCausalLMLoss as Stoker knows it"


def _why_not_inner(module: Any) -> str:
    kind = type(module)
    if digest(kind) == catalogue.INNER_LOSSES[qualified(kind)]:
        return ""
    return "its forward is of another release of transformers, or patched by somebody"


def _why_no_head(module: Any, head: Any) -> str:
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__name__}"
    if head.out_features != module.config.vocab_size:
        return f"the head has {head.out_features} outputs for a vocabulary of {module.config.vocab_size}"
    if not torch.is_floating_point(head.weight):
        return "its weights are quantised"
    return altered(head)


def _head_back(head: nn.Module) -> None:
    restore(head)
    head.__dict__.pop("_stoker_labels", None)


def _loss_back(module: Any) -> None:
    if type(module.__dict__.get("_loss_function")) is losses.CausalLoss:
        del module.__dict__["_loss_function"]
    module.__dict__.pop("_stoker_labels", None)
    ours = (losses.before_causal, losses.before_inner, losses.after_inner)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in ours]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
