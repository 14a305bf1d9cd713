"""Weights of a Hugging Face folder. Only safetensors: a pickle can run code when it is opened, so it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mrv2lab.config import ModelConfig
from mrv2lab.model.config_hf import read_json
from mrv2lab.model.errors import CheckpointError, listed
from mrv2lab.model.names import check_shapes, ignored

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_FLOATS = ("F64", "F32", "F16", "BF16")


def refuse_pickle(path: Path) -> None:
    """Raise :class:`CheckpointError` if ``path`` is a pickle checkpoint by its name."""
    if path.suffix.lower() in PICKLES:
        raise CheckpointError(
            f"{path} is a pickle checkpoint, which can run code when it is opened. Convert it where you trust it: "
            "`AutoModelForCausalLM.from_pretrained(old).save_pretrained(new, safe_serialization=True)`, then load `new`"
        )


def load_safetensors(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the decoder, in ``config.dtype``, on the host.

    Raises :class:`CheckpointError` for pickles, unreadable files, and missing, extra or misshaped tensors (listed in
    one error, before any tensor is read).
    """
    files = _shards(folder)
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    not_float: list[str] = []
    for path in files:
        with _opened(path) as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                entry = shard.get_slice(name)
                where[name], shapes[name] = path, tuple(entry.get_shape())
                if entry.get_dtype() not in _FLOATS:
                    not_float.append(f"{name} is {entry.get_dtype()}")
    check_shapes(shapes, config, str(folder))
    if not_float:
        raise CheckpointError(f"{folder}: quantised or integer tensors are not supported: {listed(not_float)}")
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        with _opened(path) as shard:
            for name in (name for name, at in where.items() if at == path and not ignored(name, config)):
                weights[name] = shard.get_tensor(name).to(dtype)
    return weights


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no readable safetensors file ({error}); copy or download it again") from error


def _shards(folder: Path) -> list[Path]:
    """``model.safetensors``, or the files that ``model.safetensors.index.json`` names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise CheckpointError(f"{index} names files outside its folder: {listed(outside)}")
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            raise CheckpointError(f"{folder}: shards named by {index.name} are missing: {listed(missing)}")
        return [folder / name for name in names]
    for path in sorted(folder.iterdir()):
        refuse_pickle(path)
    raise CheckpointError(
        f"{folder} holds no model.safetensors and no model.safetensors.index.json. For seeded random weights of its "
        "shape take its ModelConfig in its place: "
        f"Engine(config_from_folder(Path({str(folder)!r}))), from mrv2lab.model.config_hf"
    )
