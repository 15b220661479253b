"""Draws and crops that are one kernel on a GPU are those of the algorithms as they are written."""

import pytest
import torch

from parabolic.memory import distinct
from parabolic.streams import CropFlip

pytestmark = pytest.mark.gpu


def generator(seed):
    return torch.Generator("cuda").manual_seed(seed)


@pytest.mark.parametrize(
    ("size", "total"), [(1, 1), (32, 32), (32, 33), (5, 1000), (32, 10**12), (128, 130), (129, 140)]
)
def test_draws_are_those_of_floyds_loop(size, total):
    repeats = 0
    for seed in range(20):
        total_on_gpu = torch.tensor(total, device="cuda")
        drawn = distinct(size, total_on_gpu, device="cuda", generator=generator(seed))
        chance = torch.rand(size, generator=generator(seed), dtype=torch.float64, device="cuda").tolist()
        taken = []
        for last, chance_of_draw in zip(range(total - size, total), chance, strict=True):
            candidate = int(chance_of_draw * (last + 1))
            repeats += candidate in taken
            taken.append(last if candidate in taken else candidate)
        assert drawn.tolist() == taken
        assert drawn.dtype == torch.long
    assert repeats or size < 32 or total > 1000


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize(("shape", "padding"), [((5, 3, 7, 4), 2), ((64, 3, 32, 32), 4), ((3, 1, 2, 9), 0)])
def test_crops_are_those_of_one_image_at_a_time(shape, padding, flip, dtype):
    x = torch.randint(1, 256, shape, device="cuda").to(dtype)
    for images in (x, x.contiguous(memory_format=torch.channels_last), x.flip(-1)[::2].transpose(2, 3)):
        count, _, height, width = images.shape
        ours = CropFlip(padding, flip)(images, generator(1))
        seeded = generator(1)
        shift = torch.randint(2 * padding + 1, (2, count, 1), generator=seeded, device="cuda").tolist()
        mirrored = (torch.rand(count, 1, generator=seeded, device="cuda") < 0.5).tolist() if flip else [[False]] * count
        padded = torch.nn.functional.pad(images, [padding] * 4)
        for row, crop in enumerate(ours):
            (top,), (left,) = shift[0][row], shift[1][row]
            window = padded[row, :, top : top + height, left : left + width]
            assert torch.equal(crop, window.flip(-1) if mirrored[row][0] else window)
        assert ours.dtype == dtype
        assert ours.is_contiguous(memory_format=torch.channels_last)
