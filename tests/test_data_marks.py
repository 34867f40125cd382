"""The same text is found in another, however the two are divided; what only looks alike is not."""

import numpy as np
import pytest

from edkm_cli.data.marks import looked_for, marks

LINES = [f"{i}: a line that is long enough to be looked for in other texts, wherever" for i in range(320)]
POEM = [f"The {i}th rose is red," for i in range(40)]


def found(trained, measured, sampled=False):
    wanted = looked_for(measured, sampled=sampled)
    return int(np.isin(wanted, marks(trained, sampled=sampled)).any(1).sum()), len(wanted)


def test_long_lines_are_found_wherever_they_stand():
    assert found(["\n".join(LINES)], ["\n".join(LINES[::2]) + "\n"]) == (160, 161)
    assert found([f"{line}\n" for line in LINES], ["\n".join(LINES)]) == (320, 321)
    assert found(["\r\n".join(LINES)], LINES[:20]) == (20, 20)


def test_of_a_large_text_a_share_is_kept_and_only_that_is_looked_for():
    some, of = found(["\n".join(LINES)], ["\n".join(LINES[100:])], sampled=True)
    assert some == of - 1 > 3
    assert of < 40


def test_short_lines_are_found_together_and_as_documents():
    part = "A title\n\n" + "\r\n\r\n".join(POEM[7:21]) + "\nAn end"
    assert found(["\n".join(POEM)], [part])[0] == 12
    assert found(POEM, ["\n".join(POEM)]) == (40, 41)
    assert found(["\n".join(POEM)], POEM) == (40, 40)
    assert found(["\n".join(POEM)], ["\n".join(POEM[::2])])[0] == 0


@pytest.mark.parametrize("sampled", [False, True])
def test_blanks_around_a_document_do_not_count(sampled):
    assert found(["One."], [" One. \n"], sampled) == (1, 1)
    assert found(["One."], ["Two."], sampled) == (0, 1)


def test_what_several_measured_texts_have_in_common_is_not_looked_for():
    opening = "A line that all records of this kind begin with, whatever they are about after that.\n"
    assert found([opening + "Three."], [opening + "One.", opening + "Two."]) == (0, 2)
    assert found([opening + "Two."], [opening + "One.", opening + "Two."]) == (1, 2)
