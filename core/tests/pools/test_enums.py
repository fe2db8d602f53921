from __future__ import annotations

import pytest

from kvdock.errors import PoolError
from kvdock.pools.enums import DType, Layout, PoolKind
from kvdock.pools.part import Part
from kvdock.strict_enum import StrictEnum


def test_a_wrong_word_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(PoolError, match="Did you mean 'layer_first'"):
        Layout("layer_frist")


def test_a_word_far_from_all_is_refused_with_the_whole_list() -> None:
    with pytest.raises(PoolError, match=r"Known are .*mamba.*logical"):
        PoolKind("xyzzy")


def test_fields_take_words_as_text() -> None:
    assert Part("k", "bf16", [2, 4]).dtype is DType.BF16


def test_wrong_words_are_value_errors_as_with_any_enum() -> None:
    with pytest.raises(ValueError, match="not a DType"):
        DType("f17")


def test_every_element_type_has_a_width() -> None:
    assert {kind: kind.bits for kind in DType if kind.bits < 8} == {DType.FP4_E2M1: 4}


def test_layouts_with_equal_bytes_share_a_stored_order() -> None:
    shared = {layout for layout in Layout if layout.stored_order == "layer,token,head"}
    assert shared == {
        Layout.LAYER_FIRST,
        Layout.PAGE_FIRST_DIRECT,
        Layout.PAGE_OBJECT,
    }


def test_closed_lists_hold_no_word_twice() -> None:
    for words in StrictEnum.__subclasses__():
        assert len({word.value for word in words}) == len(words.__members__)
