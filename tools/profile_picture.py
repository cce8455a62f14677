"""Draw the names of layers in a profile: `python tools/profile_picture.py`.

The script compiles a training step, and writes `docs/assets/profile.svg` from the names
of its instructions, in the order in which they were traced.
"""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

import eqx_state as es


FILE = Path(__file__).resolve().parent.parent / "docs" / "assets" / "profile.svg"


class Block(es.Module):
    norm: es.nn.BatchNorm
    linear: eqx.nn.Linear
    dropout: es.nn.Dropout

    def __init__(self, key):
        a, b = jr.split(key)
        self.norm = es.nn.BatchNorm(4, axis_name="batch")
        self.linear = eqx.nn.Linear(4, 4, key=a)
        self.dropout = es.nn.Dropout(0.1, key=b)

    def __call__(self, x):
        return x + self.dropout(jax.nn.relu(self.linear(self.norm(x))))


class Net(es.Module):
    blocks: list[Block]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model, xs):
    return jnp.mean(es.vmap(model, axis_name="batch")(xs) ** 2)


@es.jit
def step(model, optimizer, xs):
    (loss, model), grads = es.value_and_grad(loss_fn)(model, xs)
    model, optimizer = optimizer.update(grads, model)
    return loss, model, optimizer


def names() -> list[tuple[str, ...]]:
    """Transform, block and layer: `("jvp(vmap(Net))", "blocks[0]", "norm")`."""
    model = Net([Block(key) for key in jr.split(jr.key(0))])
    optimizer = es.Optimizer(optax.sgd(0.1)).init(model)
    lowered = step.lower(model, optimizer, jnp.ones((8, 4)))
    compiled = lowered.compile().as_text()
    text = lowered.as_text(debug_info=True)
    locations = dict(re.findall(r'^(#loc\d+) = loc\("(.*?)"', text, re.MULTILINE))
    found = {}
    for location in re.findall(r"loc\((#loc\d+)\)", text):
        name = locations.get(location, "")
        layer = re.match(r"jit\(step\)/([^/]+)/(blocks\[\d\])/([\w.]+)/", name)
        if layer and layer[0] in compiled:
            found[layer.groups()] = None
    return list(found)


ROW = 30
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 380 {height}" role="img" \
font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', \
monospace" font-size="13">
  <title>The layers of a training step, as a profile names them</title>
  <!-- Drawn by `tools/profile_picture.py`. -->
  <style>
    svg {{ --fg: #1f2733; --box: #f4f6fa; --edge: #c6cedb; --a: #dfe4fb; --b: #fbe6d3;
          background: #fff; }}
    @media (prefers-color-scheme: dark) {{
      svg {{ --fg: #e6e9ef; --box: #262b38; --edge: #485368; --a: #35407a; --b: #6b4320;
            background: #1e2129; }}
    }}
    text {{ fill: var(--fg); }}
    rect {{ fill: var(--box); stroke: var(--edge); }}
    .jvp {{ fill: var(--a); }}
    .transpose {{ fill: var(--b); }}
  </style>
"""


def draw(names: list[tuple[str, ...]]) -> str:
    """Time goes down, calls to the right: each name is a box around what it calls."""
    boxes, y = [], 6

    def box(name: str, x: int, y: int, rows: int, style: str = "") -> None:
        size = f'width="{374 - x}" height="{ROW * rows - 4}"'
        boxes.append(
            f'  <rect{style} x="{x}" y="{y}" {size} rx="5"/>\n'
            f'  <text x="{x + 10}" y="{y + 18}">{name}</text>\n'
        )

    box("jit(step)", 6, y, 1)
    y += ROW
    for transform in dict.fromkeys(name[0] for name in names):
        inner = [name[1:] for name in names if name[0] == transform]
        style = f' class="{transform.partition("(")[0]}"'
        box(transform, 16, y, 1, style)
        way = "backward" if transform.startswith("transpose") else "forward"
        boxes.append(f'  <text x="366" y="{y + 18}" text-anchor="end">{way}</text>\n')
        y += ROW
        for block in dict.fromkeys(name[0] for name in inner):
            layers = [layer for name, layer in inner if name == block]
            box(block, 26, y, len(layers), style)
            for layer in layers:
                box(layer, 136, y, 1, style)
                y += ROW
    return HEAD.format(height=y + 2) + "".join(boxes) + "</svg>\n"


if __name__ == "__main__":
    FILE.write_text(draw(names()), encoding="utf-8")
