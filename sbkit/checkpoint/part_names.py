"""Names of tensors by the YAML's parts: `CNN.conv1.weight` for a checkpoint's `0.conv1.weight`.

A checkpoint of a torch.nn.ModuleList numbers its modules. Another YAML may list other parts in
another order, so what is compared between runs goes by the key under which a part is declared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ruamel.yaml.comments import CommentedMap
from torch import Tensor, nn


def part_names(hparams: Mapping[str, Any]) -> list[str]:
    """Name the parts of the ModuleList in its order; one that is no key keeps its number."""
    owned = hparams.get("model")
    if not isinstance(owned, nn.ModuleList):
        return []
    keys = {id(value): key for key, value in hparams.items() if isinstance(value, nn.Module)}
    return [keys.get(id(module), str(number)) for number, module in enumerate(owned)]


def part_names_in(root: CommentedMap) -> list[str]:
    """Name the parts likewise from a resolved YAML, in which an alias is the node itself."""
    keys = {id(node): str(key) for key, node in root.items()}
    arguments = root.get("model")  # by place, or as `modules`
    is_map = isinstance(arguments, CommentedMap)
    listed = arguments.get("modules") if is_map else arguments and arguments[0]
    return [keys.get(id(node), str(number)) for number, node in enumerate(listed or ())]


def to_part_name(name: str, parts: Sequence[str]) -> str:
    """Turn `0.conv1.weight` into `CNN.conv1.weight`."""
    number, _, rest = name.partition(".")
    if not number.isdecimal() or int(number) >= len(parts):
        return name
    return f"{parts[int(number)]}.{rest}"


def tensors_by_part(hparams: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the model's own tensors, parameters and buffers, by part and path."""
    owned = hparams.get("model")
    if not isinstance(owned, nn.Module):
        return {}
    parts = part_names(hparams)
    tensors = owned.state_dict(keep_vars=True)
    return {to_part_name(name, parts): each for name, each in tensors.items()}
