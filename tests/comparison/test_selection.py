import pytest

from dilabench.comparison.comparison import selection


@pytest.mark.parametrize(
    ("texts", "chosen"),
    [
        ([], True),
        (["strided"], True),
        (["STRIDED fp32"], True),
        (["strided bf16"], False),
        (["gather", "strided"], True),
        (["math dense forward"], True),
        (["gather"], False),
    ],
)
def test_words_of_a_name(make_row, texts, chosen):
    assert selection(texts)(make_row("strided").case) is chosen


def test_case_id_is_a_name(make_row):
    case = make_row("strided").case
    assert selection([case.case_id[:8]])(case)


def test_implementations_and_backends_narrow_what_texts_choose(make_row):
    case = make_row("strided", backend="math").case
    assert selection([], ["strided", "gather"], ["math"])(case)
    assert not selection([], ["gather"])(case)
    assert not selection([], ["strided"], ["flash2"])(case)
    assert not selection(["gather"], ["strided"])(case)
