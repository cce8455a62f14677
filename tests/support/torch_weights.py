"""Create `torch_weights.npz`: the outputs of PyTorch's layers and of two models.

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
    "linear_without_bias": ((5,),),
    "conv1d": ((4, 11),),
    "conv2d": ((4, 9, 8),),
    "conv2d_without_bias": ((3, 5, 5),),
    "conv3d": ((2, 5, 4, 6),),
    "conv_transpose1d": ((4, 5),),
    "conv_transpose2d": ((4, 4, 5),),
    "conv_transpose2d_in_groups": ((6, 4, 3),),
    "conv_transpose3d": ((3, 3, 2, 4),),
    "batch_norm": ((3, 4),),
    "batch_norm_new": ((3, 4),),
    "batch_norm_without_affine": ((3, 4),),
    "layer_norm": ((2, 6),),
    "layer_norm_without_bias": ((6,),),
    "group_norm": ((6, 3),),
    "embedding": ((3,),),
    "gru_cell": ((3,), (4,)),
    "gru_cell_without_bias": ((3,), (4,)),
    "lstm_cell": ((3,), (4,), (4,)),
    "lstm_cell_without_bias": ((3,), (4,), (4,)),
    "attention": ((4, 6), (4, 6), (4, 6)),
    "attention_without_bias": ((4, 6), (5, 6), (5, 6)),
    "attention_of_other_sizes": ((4, 6), (5, 3), (5, 2)),
    "encoder_layer": ((4, 6),),
    "resnet18": ((3, 32, 32),),
    "gpt2": ((6,),),
}
TOKENS = 10
OF_TOKENS = ("embedding", "gpt2")
WIDTH = 12  # of GPT-2


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
    name = name.replace("lm_head", "transformer.wte")  # tied weights
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
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, inner, outer, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outer)
            self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outer)
            self.downsample = None
            if stride > 1:
                conv = nn.Conv2d(inner, outer, 1, stride, bias=False)
                self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outer))

        def forward(self, x):
            y = F.relu(self.bn1(self.conv1(x)))
            y = self.bn2(self.conv2(y))
            return F.relu(y + (x if self.downsample is None else self.downsample(x)))

    class ResNet18(nn.Module):
        """As in torchvision, but narrower."""

        def __init__(self, width):
            super().__init__()
            self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            sizes = [width * 2**i for i in (0, 0, 1, 2, 3)]
            for i in range(1, 5):
                first = Block(sizes[i - 1], sizes[i], 1 if i == 1 else 2)
                layer = nn.Sequential(first, Block(sizes[i], sizes[i], 1))
                setattr(self, f"layer{i}", layer)
            self.fc = nn.Linear(sizes[4], 5)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.bn1(self.conv1(x[None]))), 3, 2, 1)
            x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
            return self.fc(x.mean((2, 3)))[0]

    class Attention(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.c_attn = nn.Linear(width, 3 * width)
            self.c_proj = nn.Linear(width, width)

        def forward(self, x):
            length, width = x.shape
            heads = [
                part.view(length, 3, width // 3).transpose(0, 1)
                for part in self.c_attn(x).split(width, dim=1)
            ]
            y = F.scaled_dot_product_attention(*heads, is_causal=True)
            return self.c_proj(y.transpose(0, 1).reshape(length, width))

    class Layer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.ln_1 = nn.LayerNorm(width)
            self.attn = Attention(width)
            self.ln_2 = nn.LayerNorm(width)
            self.mlp = nn.ModuleDict(
                {
                    "c_fc": nn.Linear(width, 4 * width),
                    "c_proj": nn.Linear(4 * width, width),
                }
            )

        def forward(self, x):
            x = x + self.attn(self.ln_1(x))
            y = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
            return x + self.mlp["c_proj"](y)

    class GPT2(nn.Module):
        """With the names of Hugging Face, but `Linear` in place of its `Conv1D`."""

        def __init__(self, width):
            super().__init__()
            self.transformer = nn.ModuleDict(
                {
                    "wte": nn.Embedding(TOKENS, width),
                    "wpe": nn.Embedding(8, width),
                    "h": nn.ModuleList([Layer(width) for _ in range(12)]),
                    "ln_f": nn.LayerNorm(width),
                }
            )
            self.lm_head = nn.Linear(width, TOKENS, bias=False)
            self.lm_head.weight = self.transformer["wte"].weight

        def forward(self, tokens):
            parts = self.transformer
            x = parts["wte"](tokens) + parts["wpe"](torch.arange(len(tokens)))
            for layer in parts["h"]:
                x = layer(x)
            return self.lm_head(parts["ln_f"](x))

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
        "linear_without_bias": nn.Linear(5, 3, bias=False),
        "conv1d": nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        "conv2d": nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 1), groups=2),
        "conv2d_without_bias": nn.Conv2d(3, 2, 3, bias=False),
        "conv3d": nn.Conv3d(2, 3, (1, 2, 3), padding=1),
        "conv_transpose1d": nn.ConvTranspose1d(4, 3, 3, 2, 1, output_padding=1),
        "conv_transpose2d": nn.ConvTranspose2d(4, 3, (3, 2), (2, 1), (1, 0)),
        "conv_transpose2d_in_groups": nn.ConvTranspose2d(6, 4, 3, 2, groups=2),
        "conv_transpose3d": nn.ConvTranspose3d(
            3, 6, (2, 3, 1), 2, groups=3, bias=False
        ),
        "batch_norm": Batched(nn.BatchNorm1d(3)),
        "batch_norm_new": Batched(nn.BatchNorm1d(3)),
        "batch_norm_without_affine": Batched(nn.BatchNorm1d(3, affine=False)),
        "layer_norm": nn.LayerNorm((2, 6)),
        "layer_norm_without_bias": nn.LayerNorm(6, bias=False),
        "group_norm": Batched(nn.GroupNorm(2, 6)),
        "embedding": nn.Embedding(TOKENS, 4),
        "gru_cell": nn.GRUCell(3, 4),
        "gru_cell_without_bias": nn.GRUCell(3, 4, bias=False),
        "lstm_cell": nn.LSTMCell(3, 4),
        "lstm_cell_without_bias": nn.LSTMCell(3, 4, bias=False),
        "attention": attention(6, 2),
        "attention_without_bias": attention(6, 3, bias=False),
        "attention_of_other_sizes": attention(6, 2, kdim=3, vdim=2),
        "encoder_layer": nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0),
        "resnet18": ResNet18(2),
        "gpt2": GPT2(WIDTH),
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
