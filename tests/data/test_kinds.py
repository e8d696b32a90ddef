"""Packs of images of every type and number of channels, of pages and of tiles."""

import re

import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import command_line
from tests.support.odd_files import COLOUR, GRAY, png16, tiff, tiff_of_12_bits, tiff_page
from tests.support.pictures import (
    arrays,
    command_words,
    encode,
    facts,
    file_names,
    make_pack,
    picture,
    splits,
    tar,
    zipped,
)
from tests.support.pictures import write_npy as npy

DRAWN = np.random.default_rng(0)


def values(dtype, channels=1, height=8, width=9):
    """Random values of a whole type, another array in every call."""
    shape = (height, width, channels)
    if dtype == "float32":
        return DRAWN.standard_normal(shape).astype(dtype)
    limits = np.iinfo(dtype)
    return DRAWN.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)


def folder(root, files):
    """Class folders of these files by name: "a/x.npy"."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(npy(content) if isinstance(content, np.ndarray) else content)
    return root


def kept(path):
    """The samples of a pack by name, of all splits."""
    return {
        name: image
        for split in splits(path)
        for name, image in zip(file_names(path, split), arrays(path, split)[0], strict=True)
    }


ALL_KINDS = {
    "uint16": ("uint16", 1),
    "uint16, 3 channels": ("uint16", 3),
    "int16, 5 channels": ("int16", 5),
    "float32, 13 channels": ("float32", 13),
    "uint8, 4 channels": ("uint8", 4),
}


@pytest.mark.parametrize("name", ALL_KINDS)
@pytest.mark.parametrize("writer", ["npy", "tiff"])
def test_a_pack_keeps_what_files_hold(tmp_path, name, writer):
    dtype, channels = ALL_KINDS[name]
    photometric = 2 if channels == 3 else 1
    images = {f"{label}/{i}": values(dtype, channels) for label in "ab" for i in range(9)}
    files = images
    if writer == "tiff":
        files = {path: tiff(tiff_page(image, photometric)) for path, image in images.items()}
    path = make_pack(folder(tmp_path / "images", files), tmp_path / "a.h5", split="0.5,0.5")
    found = kept(path)
    assert found.keys() == images.keys()
    assert all(np.array_equal(found[key], image) for key, image in images.items())
    pack = hp.read_pack(path)
    assert pack.dtype == dtype and pack.image_shape == (8, 9, channels)
    train = np.stack([images[key] for key in file_names(path)]).astype(np.float64)
    divisor = {"uint16": 65535, "uint8": 255}.get(dtype, 1)
    assert np.allclose(pack.mean, train.mean(axis=(0, 1, 2)) / divisor, rtol=1e-12)
    assert np.allclose(pack.std, train.std(axis=(0, 1, 2)) / divisor, rtol=1e-9)
    assert pack.statistics.low.tolist() == train.min(axis=(0, 1, 2)).tolist()


def test_processes_and_their_number_do_not_change_a_pack(tmp_path):
    images = {f"{label}/{i}": values("int16", 5) for label in "ab" for i in range(20)}
    root = folder(tmp_path / "images", images)
    one = make_pack(root, tmp_path / "one.h5", jobs=1)
    two = make_pack(root, tmp_path / "two.h5", jobs=2)
    assert one.read_bytes() == two.read_bytes()


def test_8_bits_among_16_are_multiplied_and_said_to_be(tmp_path, capfd):
    small = picture(1, 9, 8)
    files = {
        "a/small.png": encode(small),
        **{f"a/{i}.npy": values("uint16", 3) for i in range(3)},
        **{f"b/{i}.npy": values("uint16", 3) for i in range(3)},
    }
    root = folder(tmp_path / "images", files)
    for size in ({}, {"size": "9x8"}):  # with a size, the first header does not tell it
        path = make_pack(root, tmp_path / "a.h5", split="1", overwrite=True, **size)
        found = kept(path)
        assert np.array_equal(found["a/small.png"], small.astype(np.uint16) * 257)
        assert np.array_equal(found["b/1.npy"], files["b/1.npy"])
        said = capfd.readouterr().err
        assert "8-bit values, times 257, since others have 16 bits: 1 of 7 images: a/small" in said
        assert facts(path)["provenance"]["changed"] == {"bytes_to_16_bits": 1}
    said = refused(tmp_path, capfd, max_value=4095)
    assert "--max-value is one value" in said
    assert "6 of uint16 (a/0.npy), 1 of uint8 (a/small.png)" in said


def refused(tmp_path, capfd, source="images", **settings):
    """What is said of a source that is refused, and of which nothing is kept."""
    capfd.readouterr()
    words = command_words(tmp_path / source, tmp_path / "refused.h5", **{"split": "1", **settings})
    assert command_line(words) == 2 and not (tmp_path / "refused.h5").exists()
    return capfd.readouterr().err


@pytest.mark.parametrize("size", [{}, {"size": "9x8"}])
def test_mixed_types_are_refused_with_counts_and_examples(tmp_path, capfd, size):
    folder(
        tmp_path / "images",
        {
            **{f"a/{i}.npy": values("uint8", 5) for i in range(4)},
            **{f"b/{i}.npy": values("int16", 5) for i in range(3)},
            "b/x.npy": values("float32", 5),
        },
    )
    said = refused(tmp_path, capfd, **size)
    assert "1 of float32 (b/x.npy), 3 of int16 (b/0.npy, b/1.npy, b/2.npy), 4 of uint8 (a/0" in said


@pytest.mark.parametrize("size", [{}, {"size": "9x8"}])
def test_mixed_channels_are_refused_with_counts_and_examples(tmp_path, capfd, size):
    folder(
        tmp_path / "images",
        {
            **{f"a/{i}.npy": values("uint16", 4) for i in range(4)},
            **{f"b/{i}.npy": values("uint16", 5) for i in range(3)},
            "b/x.png": png16(values("uint16")[..., 0], GRAY),
        },
    )
    said = refused(tmp_path, capfd, **size)
    assert "1 with 1 (b/x.png), 4 with 4 (a/0.npy), 3 with 5 (b/0.npy, b/1.npy, b/2.npy)" in said


def test_a_page_that_is_missing_is_a_channel_that_is_missing(tmp_path, capfd):
    stacks = {f"{label}/{i}.tif": values("uint16", 4) for label in "ab" for i in range(4)}
    files = {
        name: tiff(*(tiff_page(stack[..., c]) for c in range(4))) for name, stack in stacks.items()
    }
    root = folder(tmp_path / "images", files)
    path = make_pack(root, tmp_path / "a.h5", split="1", pages="channels")
    assert all(np.array_equal(image, stacks[name]) for name, image in kept(path).items())
    assert facts(path)["provenance"]["pages"] == "channels"
    folder(root, {"b/1.tif": tiff(*(tiff_page(stacks["b/1.tif"][..., c]) for c in range(3)))})
    said = refused(tmp_path, capfd, pages="channels")
    assert "1 with 3 (b/1.tif), 7 with 4 (a/0.tif): give files of equal numbers of pages" in said


def test_pages_of_other_axes_are_refused_and_the_axes_are_printed(tmp_path, capfd):
    import tifffile

    stacks = {f"{label}/{i}.tif": values("uint16", 6) for label in "ab" for i in range(3)}
    root = folder(tmp_path / "images", stacks)
    for name, image in stacks.items():
        planes = np.moveaxis(image, -1, 0).reshape(3, 2, 8, 9)
        tifffile.imwrite(root / name, planes, imagej=True, metadata={"axes": "ZCYX"})
    path = make_pack(root, tmp_path / "a.h5", split="1", pages="channels")
    assert all(np.array_equal(image, stacks[name]) for name, image in kept(path).items())
    assert facts(path)["provenance"]["axes"] == "Z 3 x C 2"
    assert "6 channels (pages: Z 3 x C 2), uint16" in capfd.readouterr().out
    planes = np.moveaxis(stacks["b/2.tif"], -1, 0)
    tifffile.imwrite(root / "b/2.tif", planes, imagej=True, metadata={"axes": "ZYX"})
    said = refused(tmp_path, capfd, pages="channels")
    assert "5 as Z 3 x C 2 (a/0.tif), 1 as Z 6 (b/2.tif)" in said
    tifffile.imwrite(root / "b/2.tif", planes[0])
    said = refused(tmp_path, capfd, pages="channels", channels=3)
    assert "a/0.tif: 6 channels, not 3" in said and "b/2.tif: 1 channel, not 3" in said
    (root / "a/0.tif").write_bytes(tiff(*(tiff_page(plane) for plane in planes)))
    tifffile.imwrite(root / "b/2.tif", planes, metadata=None)
    path = make_pack(root, tmp_path / "b.h5", split="1", pages="channels")
    assert facts(path)["provenance"]["axes"] == "Z 3 x C 2"  # of those that state them


def test_several_pages_are_refused_with_their_number(tmp_path, capfd):
    stack = tiff(*(tiff_page(values("uint16")[..., 0]) for _ in range(4)))
    folder(tmp_path / "images", {"a/x.tif": stack, "b/y.npy": values("uint16")})
    assert "a/x.tif: 4 pages in one TIFF" in refused(tmp_path, capfd)
    (tmp_path / "images" / "b" / "y.npy").write_bytes(stack)
    said = refused(tmp_path, capfd, nodata="nan")  # the reason is not that of an absent type
    assert "a/x.tif: 4 pages in one TIFF" in said and "--nodata" not in said


def test_dtype_uint8_reduces_as_before(tmp_path, capfd):
    deep = values("uint16")[..., 0]
    files = {"a/x.png": png16(deep, GRAY), "b/y.png": encode(deep.astype(np.uint8)[..., None])}
    path = make_pack(
        folder(tmp_path / "images", files), tmp_path / "a.h5", split="1", dtype="uint8"
    )
    found = kept(path)
    assert found["a/x.png"].dtype == np.uint8
    assert np.array_equal(found["a/x.png"][..., 0], (deep.astype(int) + 128) // 257)
    assert "more than 8 bits per channel, reduced to 8" in capfd.readouterr().err
    folder(tmp_path / "images", {"a/z.npy": deep})
    said = refused(tmp_path, capfd, dtype="uint8")
    assert "a/z.npy: an array of uint16, which --dtype uint8 does not reduce" in said


@pytest.mark.parametrize("most", [1023, 4095])
def test_a_range_that_leaves_most_of_16_bits_unused_is_noted(tmp_path, capfd, most):
    few = np.minimum(values("uint16"), most)
    files = {
        f"{label}/{i}.tif": tiff_of_12_bits(few[..., 0]) if i else npy(few)
        for label in "ab"
        for i in range(3)
    }
    root = folder(tmp_path / "images", files)
    make_pack(root, tmp_path / "a.h5", split="1")
    assert f"--max-value {most}" in capfd.readouterr().err
    path = make_pack(root, tmp_path / "b.h5", split="1", max_value=most)
    said = capfd.readouterr().err
    assert "--max-value" not in said and hp.read_pack(path).scale.divisor == most
    make_pack(root, tmp_path / "c.h5", split="1", max_value=most - 1)
    beyond = 6 * int((few == most).sum())
    said = capfd.readouterr().err
    assert f"{beyond:,} values in 6 images are beyond --max-value {most - 1:,}" in said


def test_floats_and_signed_values_need_a_scale_and_are_told_so(tmp_path, capfd):
    root = folder(tmp_path / "images", {f"{c}/x.npy": values("int16") for c in "ab"})
    make_pack(root, tmp_path / "a.h5", split="1")
    assert re.search(
        r"int16 values from -3\d,\d+ to 3\d,\d+ .* --max-value", capfd.readouterr().err
    )


def test_floats_in_0_to_1_need_no_scale(tmp_path, capfd):
    images = {
        f"{c}/x.npy": np.linspace(0, n, 72, dtype="f4").reshape(8, 9) for n, c in enumerate("ba")
    }
    make_pack(folder(tmp_path / "images", images), tmp_path / "a.h5", split="1")
    assert "--max-value" not in capfd.readouterr().err


def test_a_file_of_numpy_holds_one_array_and_no_more(tmp_path, capfd):
    """np.save to an open file appends: of two arrays, np.load returns the first."""
    first = npy(values("uint16"))
    files = {"a/x.npy": first + first, "b/y.npy": values("uint16")}
    folder(tmp_path / "images", files)
    assert f"a/x.npy: {len(first):,} bytes after its array" in refused(tmp_path, capfd)


def holes(number):
    image = values("float32", 2)
    image[2, 3, 1] = number
    return image


def test_nan_and_infinity_are_refused_with_their_place(tmp_path, capfd):
    for name, number in (("nan", np.nan), ("inf", np.inf)):
        folder(tmp_path / name, {"a/x.npy": holes(number), "b/y.npy": values("float32", 2)})
        said = refused(tmp_path, capfd, source=name)
        assert (
            "a/x.npy: 1 value is NaN or infinite, the first in row 2, column 3, channel 1" in said
        )
        assert ("--nodata nan" in said) == (name == "nan")
    path = make_pack(tmp_path / "nan", tmp_path / "a.h5", split="1", nodata="nan")
    assert np.isnan(kept(path)["a/x.npy"][2, 3, 1])
    refused(tmp_path, capfd, source="inf", nodata="nan")


def test_nodata_is_left_out_of_the_statistics(tmp_path, capfd):
    images = {f"{label}/{i}.npy": values("int16", 2) // 2 for label in "ab" for i in range(3)}
    for image in images.values():
        image[:3] = -32768
    path = make_pack(
        folder(tmp_path / "images", images),
        tmp_path / "a.h5",
        split="1",
        nodata=-32768,
        max_value=16384,
    )
    pack = hp.read_pack(path)
    seen = np.stack([*images.values()])[:, 3:]
    assert np.allclose(pack.mean, seen.mean(axis=(0, 1, 2)) / 16384)
    assert pack.scale.nodata == -32768 and pack.statistics.low.min() == seen.min()
    assert "beyond" not in capfd.readouterr().err
    assert "no value of int16 images" in refused(tmp_path, capfd, nodata=0.5)
    assert "no value of int16 images" in refused(tmp_path, capfd, nodata="nan")
    for nodata in ("inf", 2**53 + 1):  # float64 would round it
        said = refused(tmp_path, capfd, nodata=nodata)
        assert "give a number that float64 holds exactly, or nan" in said


@pytest.mark.parametrize("nodata, is_noted", [(-9999, False), (-32768, True)])
def test_another_nodata_value_than_the_given_one_is_noted(tmp_path, capfd, nodata, is_noted):
    page = tiff_page(values("int16")[..., 0], t42113=b"-9.999e3 ")
    folder(tmp_path / "images", {"a/x.tif": tiff(page), "b/y.npy": values("int16")})
    make_pack(tmp_path / "images", tmp_path / "a.h5", split="1", nodata=nodata)
    assert ("GDAL_NODATA -9.999e3" in capfd.readouterr().err) == is_noted


def test_an_image_of_nothing_but_nodata_is_refused_by_name(tmp_path, capfd):
    folder(
        tmp_path / "images",
        {
            "a/x.npy": np.full((8, 9), 7, np.uint16),
            "a/y.npy": values("uint16"),
            "b/z.npy": holes(0),
        },
    )
    folder(tmp_path / "images", {"b/z.npy": values("uint16")})
    refused(tmp_path, capfd, nodata=7)
    path = make_pack(tmp_path / "images", tmp_path / "a.h5", split="1", nodata=7, skip_bad=True)
    assert "a/x.npy: all its values are nodata" in capfd.readouterr().err
    assert sorted(kept(path)) == ["a/y.npy", "b/z.npy"]


def test_nodata_is_not_blended_by_resizing(tmp_path, capfd):
    folder(tmp_path / "images", {f"{c}/x.npy": values("uint16") for c in "ab"})
    said = refused(tmp_path, capfd, nodata=7, size="4x4")
    assert "a/x.npy: 9x8 pixels, not 4x4, and resizing would change" in said


def test_jpeg_packs_hold_8_bits(tmp_path, capfd):
    pictures = {f"{c}/{i}.png": encode(picture(i, 9, 8)) for c in "ab" for i in range(3)}
    folder(tmp_path / "images", {**pictures, "b/x.png": png16(values("uint16", 3), COLOUR)})
    for size in ({}, {"size": "9x8"}):
        said = refused(tmp_path, capfd, encoding="jpeg", **size)
        assert "--encoding jpeg keeps 8 bits, and images are uint16" in said
    path = tmp_path / "a.h5"
    make_pack(tmp_path / "images", path, encoding="jpeg", dtype="uint8", split="1")
    assert facts(path)["provenance"]["changed"]["sixteen_bits"] == 1


def test_other_types_are_refused_by_name(tmp_path, capfd):
    folder(tmp_path / "images", {f"{c}/x.npy": values("int16").astype(float) for c in "ab"})
    said = refused(tmp_path, capfd)
    assert "a/x.npy: float64 values from -3" in said and "none of its 2 files can be packed" in said


def test_large_files_that_differ_in_a_few_bytes_are_not_equal(tmp_path):
    """Of which a part in the middle is compared first."""
    files = {f"{c}/{i}.npy": np.zeros((300, 301), np.uint8) for c in "ab" for i in range(4)}
    for number, name in enumerate(files):
        files[name][-1, number // 2] = 1  # in pairs
    root = folder(tmp_path / "images", files)
    sources = [root]
    for suffix, make in ((".tar", tar), (".zip", zipped)):
        sources.append(make(tmp_path / f"images{suffix}", root))
    for source in sources:
        path = make_pack(source, tmp_path / "a.h5", split="1", overwrite=True)
        equal = facts(path)["provenance"]["duplicates"]
        assert (equal["groups"], equal["images"]) == (4, 8)


# Tiles


def scans(dtype="uint16", channels=2):
    sizes = {"a/1.npy": (20, 30), "a/2.npy": (9, 8), "b/3.npy": (17, 23), "b/4.npy": (8, 41)}
    return {name: values(dtype, channels, *size) for name, size in sizes.items()}


@pytest.mark.parametrize("overlap", [0, 3])
@pytest.mark.parametrize("jobs", [1, 2])
def test_tiles_are_the_pixels_of_their_place_and_miss_none(tmp_path, overlap, jobs):
    files = {
        name.replace("/", f"/{i}-"): np.roll(image, i)
        for name, image in scans().items()
        for i in range(5)
    }
    path = make_pack(
        folder(tmp_path / "images", files),
        tmp_path / "a.h5",
        tiles="7x6",
        overlap=overlap,
        split="0.5,0.5",
        jobs=jobs,
    )
    seen = {name: np.zeros(image.shape[:2], int) for name, image in files.items()}
    for name, tile in kept(path).items():
        file, *numbers = re.fullmatch(r"(.*)\[(\d+):(\d+), (\d+):(\d+)\]", name).groups()
        top, bottom, left, right = map(int, numbers)
        assert np.array_equal(tile, files[file][top:bottom, left:right])
        assert tile.shape == (6, 7, 2)
        seen[file][top:bottom, left:right] += 1
    assert all((count > 0).all() for count in seen.values())
    split_of = {}
    for split in splits(path):
        for name in file_names(path, split):
            split_of.setdefault(name.partition("[")[0], set()).add(split)
    assert {len(of) for of in split_of.values()} == {1} and len(split_of) == len(files)
    assert facts(path)["provenance"]["tiles"] == {"overlap": overlap, "files": 20, "empty": 0}
    assert facts(path)["provenance"]["fit"] == "tiles"
    hp.read_pack(path)
    with hp.Split(hp.read_pack(path), "train") as split:
        split.gather(np.arange(len(split)), np.empty((len(split), 6, 7, 2), np.uint16))  # checksums


def test_neighbouring_tiles_share_the_overlap_and_the_last_one_more(tmp_path):
    images = {f"{c}/x.npy": values("uint16", height=8, width=20) for c in "ab"}
    path = make_pack(
        folder(tmp_path / "images", images), tmp_path / "a.h5", split="1", tiles="8x8", overlap=3
    )
    columns = ("0:8", "5:13", "10:18", "12:20")
    assert sorted(kept(path)) == sorted(f"{name}[0:8, {c}]" for name in images for c in columns)


def test_tiles_of_equal_files_stay_together(tmp_path):
    files = {**scans(), **{f"b/{i}.npy": values("uint16", 2, 12, 14) for i in range(9)}}
    files["a/copy.npy"] = files["a/1.npy"]
    path = make_pack(
        folder(tmp_path / "images", files), tmp_path / "a.h5", tiles="8x8", split="0.5,0.5"
    )
    holding = {
        split
        for split in splits(path)
        for name in file_names(path, split)
        if name.startswith(("a/1.npy", "a/copy.npy"))
    }
    assert len(holding) == 1
    assert facts(path)["provenance"]["duplicates"]["groups"] == 12


@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_transparency_is_laid_over_the_white_of_max_value(tmp_path, capfd, encoding):
    """The pack says which it was: files for its networks are decoded likewise."""
    half = np.full((12, 14, 4), 99, np.uint8)
    half[:6, :, 3] = 0
    root = folder(tmp_path / "images", {f"{label}/half.png": encode(half) for label in "ab"})
    make_pack(root, tmp_path / "a.h5", max_value=100, split="1", encoding=encoding)
    assert "are beyond" not in capfd.readouterr().err
    pack = hp.read_pack(tmp_path / "a.h5")
    with hp.Split(pack, "train") as split:
        image = np.empty((1, *pack.image_shape), np.uint8)
        split.gather(np.array([0]), image)
    assert image[0, 0].max() <= 101 and image[0, 0].min() >= 99
    assert pack.provenance["white"] == 100


def test_changes_of_tiles_are_counted_by_file(tmp_path, capfd):
    half = np.full((12, 14, 4), 99, np.uint8)
    half[:6, :, 3] = 0
    files = {f"{label}/{i}.png": encode(picture(i, 12, 14)) for label in "ab" for i in range(3)}
    root = folder(tmp_path / "images", {**files, "a/half.png": encode(half)})
    make_pack(root, tmp_path / "a.h5", tiles="6x6", split="1")
    said = capfd.readouterr().err
    assert "transparency, laid over white (--background): 1 of 7 files: a/half.png\n" in said


def test_tiles_that_do_not_fit_are_refused(tmp_path, capfd):
    folder(tmp_path / "images", scans())
    said = refused(tmp_path, capfd, tiles="9x8")
    assert "a/2.npy: 8x9 pixels, smaller than a tile of 9x8" in said
    path = make_pack(tmp_path / "images", tmp_path / "a.h5", tiles="9x8", skip_bad=True, split="1")
    assert not any(name.startswith("a/2") for name in kept(path))
    said = refused(tmp_path, capfd, tiles="8x8", overlap=8)
    assert "--overlap 8 with --tiles 8x8" in said
    assert "--overlap 3 needs --tiles" in refused(tmp_path, capfd, overlap=3, size="9x9")
    assert "--size" in refused(tmp_path, capfd, tiles="8x8", size="9x9")
    assert "--encoding jpeg" in refused(tmp_path, capfd, tiles="8x8", encoding="jpeg")


def test_tiles_of_nothing_but_nodata_are_left_out_and_counted(tmp_path, capfd):
    files = scans("float32", 2)
    files["a/1.npy"][:8, :8] = np.nan
    root = folder(tmp_path / "images", files)
    path = make_pack(root, tmp_path / "a.h5", tiles="8x8", nodata="nan", split="1")
    assert "1 tile left out, all nodata: a/1.npy[0:8, 0:8]" in capfd.readouterr().err
    found = kept(path)
    assert "a/1.npy[0:8, 0:8]" not in found and "a/1.npy[0:8, 8:16]" in found
    assert facts(path)["provenance"]["tiles"]["empty"] == 1
    assert facts(path)["provenance"]["skipped"]["files"] == 0


def test_a_damaged_file_is_named_once_for_all_its_tiles(tmp_path, capfd):
    files = {
        f"{c}/{i}.png": png16(values("uint16", 1, 20, 20)[..., 0], GRAY)
        for c in "ab"
        for i in range(3)
    }
    spoiled = bytearray(files["b/1.png"])
    spoiled[300] ^= 1
    root = folder(tmp_path / "images", {**files, "b/1.png": bytes(spoiled)})
    path = make_pack(root, tmp_path / "a.h5", tiles="8x8", skip_bad=True, split="1")
    said = capfd.readouterr().err
    assert said.count("unreadable: b/1.png") == 1 and "1 of 6 files left out" in said
    assert len(kept(path)) == 5 * 9
