"""A file in LEAF's layout, for the benchmark of reading it."""

import json
from pathlib import Path

from knnper.seeding import RandomKey

NUM_PIXELS = 784
NUM_CLASSES = 62
NUM_IMAGES = 200
FRACTION_INK = 0.2


def write_leaf_file(path: Path, num_users: int, num_samples: int) -> None:
    """Write a FEMNIST of random images, a fifth of whose pixels are not white.

    Parameters
    ----------
    num_users, num_samples
        Users in the file, and the images that each has.
    """
    names = [f"f{number:04d}_00" for number in range(num_users)]
    images = _image_texts()
    generator = RandomKey(0, ("benchmark", "leaf users")).numpy()
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        counts = json.dumps([num_samples] * num_users)
        file.write(f'{{"users": {json.dumps(names)}, "num_samples": {counts}')
        file.write(', "user_data": {')
        for number, name in enumerate(names):
            chosen = generator.integers(0, NUM_IMAGES, num_samples)
            labels = generator.integers(0, NUM_CLASSES, num_samples).tolist()
            x = ", ".join(images[at] for at in chosen)
            file.write(", " if number else "")
            file.write(f'"{name}": {{"x": [{x}], "y": {json.dumps(labels)}}}')
        file.write("}}")


def _image_texts() -> list[str]:
    """Return images as LEAF writes them: 784 numbers, those of white pixels 1.0."""
    generator = RandomKey(0, ("benchmark", "leaf images")).numpy()
    pixels = generator.integers(0, 256, (NUM_IMAGES, NUM_PIXELS))
    pixels[generator.random(pixels.shape) >= FRACTION_INK] = 255
    return [json.dumps(image) for image in (pixels / 255).tolist()]
