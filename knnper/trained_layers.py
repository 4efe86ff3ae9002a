"""Choice of the trained layers: the head, the last blocks, or LoRA's adapters."""

import hashlib
from collections.abc import Collection, Iterable, Iterator

from torch import Tensor, nn

from knnper.embedding_model import EmbeddingModel, LoraSettings, ModelSettings
from knnper.errors import ConfigError, Problem
from knnper.process import import_extra, import_torchvision

# The module whose parts are the blocks has more than this share of the weights of φ,
# embedding tables apart.
_MIN_BLOCK_SHARE = 0.8


def train_only(module: EmbeddingModel, settings: ModelSettings) -> None:
    """Freeze all layers that the settings do not train; with LoRA, add the adapters."""
    if settings.trained == "all":
        return
    trained = {*module.classifier.modules()}
    if settings.trained == "last_blocks":
        trained |= _last_blocks(module, settings.num_blocks)
    elif settings.trained == "lora":
        trained |= _adapters(module, settings.lora)
    module.trained = frozenset(trained)
    chosen = _tensor_ids(trained)
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    module.train()


def _last_blocks(module: EmbeddingModel, count: int) -> set[nn.Module]:
    """Return the modules of the last blocks and of the layers defined behind them.

    The blocks are the parts of the smallest module that has most of the weights of φ.
    """
    head = {*module.classifier.modules()}

    def size(part: nn.Module) -> int:
        return sum(
            parameter.numel()
            for layer in part.modules()
            if layer not in head and not isinstance(layer, nn.Embedding)
            for parameter in layer.parameters(recurse=False)
        )

    def parts(part: nn.Module) -> list[nn.Module]:
        return [child for child in part.children() if child not in head and size(child)]

    whole = size(module)
    holders = [
        block
        for block in module.modules()
        if size(block) > _MIN_BLOCK_SHARE * whole and len(parts(block)) > 1
    ]
    blocks = parts(min(holders, key=size)) if holders else []
    if count >= len(blocks):
        message = (
            f"found {count}, expected at most {len(blocks) - 1} of this model's "
            f"{len(blocks)} blocks; to train all of them, set trained: all"
        )
        raise ConfigError([Problem("model.num_blocks", message)])
    ordered = list(module.modules())  # as they are defined
    behind = ordered[ordered.index(blocks[-count]) :]
    return {layer for layer in behind if layer not in head}


def _adapters(module: EmbeddingModel, settings: LoraSettings) -> set[nn.Module]:
    """Add LoRA's adapters to φ and return their modules."""
    # peft imports torchvision, which needs our preparation first.
    import_torchvision()
    peft = import_extra("peft", "pretrained", "model.trained: lora")
    head = {*module.classifier.modules()}

    def is_target(name: str, layer: nn.Module) -> bool:
        if settings.targets is not None:
            return name.endswith(settings.targets)
        if isinstance(layer, nn.Conv2d):
            return layer.groups == 1 and layer.kernel_size == (1, 1)
        return isinstance(layer, nn.Linear)

    layers = {
        name: layer for name, layer in module.named_modules() if layer not in head
    }
    targets = [name for name, layer in layers.items() if is_target(name, layer)]
    if not targets:
        message = (
            "found no layer of the model to adapt, expected suffixes of layer names, "
            f"such as {[*layers][-1]!r}"
        )
        raise ConfigError([Problem("model.lora.targets", message)])
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
    )
    peft.inject_adapter_in_model(config, module)
    return {layer for name, layer in module.named_modules() if "lora_" in name}


def trained_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the tensors of the flat vector: name, tensor, whether it is a parameter.

    Trained parameters come first, then floating-point buffers of trained modules.
    """
    trained = getattr(module, "trained", None)
    # Compared by tensor, since a shared tensor has the name of its first module only.
    chosen = None if trained is None else _tensor_ids(trained)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (chosen is None or id(parameter) in chosen):
            yield name, parameter, True
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and (chosen is None or id(buffer) in chosen):
            yield name, buffer, False


def _tensor_ids(owners: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the tensors that modules own."""
    return {
        id(tensor)
        for owner in owners
        for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
    }


def frozen_fingerprint(
    module: EmbeddingModel, trained: Collection[int] | None = None
) -> str:
    """Return the SHA-256, in hexadecimal, of the frozen weights; empty without any.

    ``trained``: The ids of the trained tensors; None: those of the module.
    """
    if trained is None:
        trained = {id(tensor) for _, tensor, _ in trained_tensors(module)}
    digest, is_whole = hashlib.sha256(module.described.encode()), True
    for name, tensor in sorted(module.state_dict(keep_vars=True).items()):
        if id(tensor) not in trained and tensor.is_floating_point():
            is_whole = False
            digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().float().contiguous().cpu().numpy().data)
    return "" if is_whole else digest.hexdigest()
