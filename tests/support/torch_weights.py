"""Create `torch_weights.npz`: the outputs of PyTorch's layers.

Run `python tests/support/torch_weights.py` in an environment with PyTorch. The tests
need only the functions here and the file, which PyTorch 2.15.0 created on a CPU. The
file contains the outputs, and the names and shapes of each state dict. Weights and
inputs are not stored: they are random numbers that are the same in all NumPy versions.
"""

import json
import pathlib
import zlib
from typing import Any

import numpy as np


FILE = pathlib.Path(__file__).with_suffix(".npz")

# The shapes of the inputs. Inputs of `OF_TOKENS` are integers below `TOKENS`.
INPUTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "linear": ((5,),),
    "conv2d": ((4, 9, 8),),
    "conv_transpose2d": ((4, 4, 5),),
    "conv_transpose2d_in_groups": ((6, 4, 3),),
    "conv_transpose3d": ((3, 3, 2, 4),),
    "batch_norm": ((3, 4),),
    "batch_norm_new": ((3, 4),),
    "batch_norm_without_affine": ((3, 4),),
    "layer_norm": ((2, 6),),
    "group_norm": ((6, 3),),
    "embedding": ((3,),),
    "gru_cell": ((3,), (4,)),
    "gru_cell_without_bias": ((3,), (4,)),
    "lstm_cell": ((3,), (4,), (4,)),
    "lstm_cell_without_bias": ((3,), (4,), (4,)),
    "attention": ((4, 6), (4, 6), (4, 6)),
    "attention_without_bias": ((4, 6), (5, 6), (5, 6)),
    "attention_of_other_sizes": ((4, 6), (5, 3), (5, 2)),
}
TOKENS = 10
OF_TOKENS = ("embedding",)


def _noise(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)


def inputs(case: str) -> list[np.ndarray]:
    found = []
    for i, shape in enumerate(INPUTS[case]):
        noise = _noise(f"{case} {i}", shape)
        is_token = case in OF_TOKENS
        found.append(
            (10 * abs(noise)).astype(np.int64) % TOKENS
            if is_token
            else noise.astype(np.float32)
        )
    return found


def tensor(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight or buffer of one case."""
    if name.endswith("num_batches_tracked"):
        return np.array(0 if case == "batch_norm_new" else 7)
    noise = _noise(f"{case} {name}", shape)
    if name.endswith("running_var"):
        noise = 0.5 + abs(noise)
    elif len(shape) > 1:
        noise = noise / np.sqrt(np.prod(shape[1:]))
    elif name.endswith("weight"):
        noise = 1 + 0.2 * noise
    return noise.astype(np.float32)


def state_dict(case: str) -> dict[str, np.ndarray]:
    """The result of `module.state_dict()`, as NumPy arrays."""
    with np.load(FILE) as file:
        shapes = json.loads(str(file["shapes"]))[case]
    return {name: tensor(case, name, tuple(shape)) for name, shape in shapes.items()}


def output(case: str) -> np.ndarray:
    """The output of PyTorch in eval mode."""
    with np.load(FILE) as file:
        return file[case]


def modules() -> dict[str, Any]:
    """PyTorch's modules, by case."""
    from torch import nn

    class Batched(nn.Module):
        """Has the state dict of a layer, and calls it for one example."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer
            self.state_dict = layer.state_dict
            self.load_state_dict = layer.load_state_dict

        def forward(self, x):
            return self.layer(x[None])[0]

    attention = nn.MultiheadAttention
    return {
        "linear": nn.Linear(5, 3),
        "conv2d": nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1), groups=2),
        "conv_transpose2d": nn.ConvTranspose2d(4, 3, (3, 2), (2, 1), (1, 0)),
        "conv_transpose2d_in_groups": nn.ConvTranspose2d(6, 4, 3, 2, groups=2),
        "conv_transpose3d": nn.ConvTranspose3d(
            3, 6, (2, 3, 1), 2, groups=3, bias=False
        ),
        "batch_norm": Batched(nn.BatchNorm1d(3)),
        "batch_norm_new": Batched(nn.BatchNorm1d(3)),
        "batch_norm_without_affine": Batched(nn.BatchNorm1d(3, affine=False)),
        "layer_norm": nn.LayerNorm((2, 6)),
        "group_norm": Batched(nn.GroupNorm(2, 6)),
        "embedding": nn.Embedding(TOKENS, 4),
        "gru_cell": nn.GRUCell(3, 4),
        "gru_cell_without_bias": nn.GRUCell(3, 4, bias=False),
        "lstm_cell": nn.LSTMCell(3, 4),
        "lstm_cell_without_bias": nn.LSTMCell(3, 4, bias=False),
        "attention": attention(6, 2),
        "attention_without_bias": attention(6, 3, bias=False),
        "attention_of_other_sizes": attention(6, 2, kdim=3, vdim=2),
    }


def main() -> None:
    import torch

    arrays: dict[str, np.ndarray] = {}
    shapes: dict[str, dict[str, list[int]]] = {}
    for case, module in modules().items():
        shapes[case] = {name: list(x.shape) for name, x in module.state_dict().items()}
        new = {k: tensor(case, k, tuple(shape)) for k, shape in shapes[case].items()}
        module.load_state_dict({k: torch.tensor(x) for k, x in new.items()})
        xs = [torch.tensor(x) for x in inputs(case)]
        if "lstm" in case:
            xs = [xs[0], tuple(xs[1:])]
        with torch.no_grad():
            out = module.eval()(*xs)
        if "attention" in case:
            out = out[0]
        if "lstm" in case:
            out = torch.stack(out)
        arrays[case] = out.numpy()
    arrays["shapes"] = np.array(json.dumps(shapes))
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
