"""Create `torch_reference.npz`: 50 training steps of PyTorch's batch norm.

Run `python tests/support/torch_reference.py` in an environment with PyTorch. The tests
need only the functions here and the file, which PyTorch 2.15.0 created on a CPU.
"""

import pathlib

import numpy as np


STEPS = 50
EVERY = 7  # outputs are large, so only those of every 7th step are stored
# The weight of the old average; PyTorch's `momentum` is 0.1, that of the batch.
MOMENTUM = 0.9
EPS = 1e-3
SHAPES = {"batch": (16, 3), "sequence": (8, 3, 5), "image": (4, 3, 3, 3)}
WEIGHT = np.array([0.5, 1.0, 2.0], np.float32)
BIAS = np.array([-1.0, 0.0, 1.0], np.float32)
FILE = pathlib.Path(__file__).with_suffix(".npz")


def inputs(name: str, step: int) -> np.ndarray:
    """The batch of one step, with the channels in axis 1."""
    shape = SHAPES[name]
    # The same in all versions.
    noise = np.random.RandomState(step).standard_normal(shape)
    spread = np.array([0.5, 1.0, 3.0]).reshape(3, *[1] * (len(shape) - 2))
    return (spread * noise + spread[::-1] + 0.02 * step).astype(np.float32)


def main() -> None:
    import torch

    arrays = {}
    for name, shape in SHAPES.items():
        cls = getattr(torch.nn, f"BatchNorm{max(len(shape) - 2, 1)}d")
        norm = cls(3, eps=EPS, momentum=1 - MOMENTUM)
        norm.load_state_dict(
            {
                **norm.state_dict(),
                "weight": torch.tensor(WEIGHT),
                "bias": torch.tensor(BIAS),
            }
        )
        outputs, means, variances = [], [], []
        for step in range(STEPS):
            outputs.append(norm(torch.tensor(inputs(name, step))).detach().numpy())
            means.append(norm.running_mean.numpy().copy())
            variances.append(norm.running_var.numpy().copy())
        norm.eval()
        evaluated = norm(torch.tensor(inputs(name, STEPS))).detach().numpy()
        arrays |= {
            f"{name}_outputs": np.stack(outputs[::EVERY]),
            f"{name}_mean": np.stack(means),
            f"{name}_var": np.stack(variances),
            f"{name}_evaluated": evaluated,
        }
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()
