"""Sheets of images with captions."""

from __future__ import annotations

import numpy as np

from hpctrain.report.pictures import draw_captioned, shown_values


def test_images_stand_in_rows_with_their_captions_below():
    images = np.zeros((10, 28, 28, 1), np.float32)
    images[1], images[9] = 0.5, 1
    captions = [("true: 1", f"answer: {n} " + "x" * 99 * (n == 9)) for n in range(10)]
    sheet = draw_captioned(images, captions)
    assert sheet.dtype == np.uint8
    wide, high = sheet.shape[1] // 8, sheet.shape[0] // 2
    assert sheet.shape == (2 * high, 8 * wide, 3)
    tiles = sheet.reshape(2, high, 8, wide, 3).transpose(0, 2, 1, 3, 4).reshape(16, high, wide, 3)
    for number, value in ((0, 0), (1, 128), (8, 0), (9, 255)):
        assert (tiles[number][4:88, 4:88] == value).all()
        assert (tiles[number][90:] < 100).any(), "no caption"
        assert (tiles[number][:, -3:] == 255).all(), "a caption reaches its neighbour"
    assert (tiles[10:] == 255).all()


def test_one_image_takes_the_room_of_one():
    sheet = draw_captioned(np.zeros((1, 200, 300, 3), np.float32), [("a", "b")])
    assert sheet.shape[0] < 260
    assert sheet.shape[1] < 320


def test_values_are_shown_in_their_range():
    assert shown_values(np.array([[[[0], [255]]]], np.uint8)).ravel().tolist() == [0, 1]
    inside = np.array([[[[0.25], [0.5]]]], np.float32)
    assert shown_values(inside).ravel().tolist() == [0.25, 0.5]
    outside = np.array([[[[-1.0], [3.0], [1.0], [np.nan]]]], np.float64)
    assert shown_values(outside).ravel().tolist() == [0, 1, 0.5, 0.25]
