import pytest

from papers.reproduce import Paragraph, leading_comment, split_title


def test_paragraphs_and_listings() -> None:
    text = (
        "# Figure 9,\n# weak and strong clients:\n#\n#   knnper reproduce x.yaml\n"
        "#   knnper report y\n#\n#\n# It departs.\nname: x # not this\n# nor this\n"
    )
    assert leading_comment(text) == (
        Paragraph("Figure 9, weak and strong clients:", False),
        Paragraph("knnper reproduce x.yaml\nknnper report y", True),
        Paragraph("It departs.", False),
    )


def test_a_listing_ends_a_paragraph() -> None:
    found = leading_comment("# a\n#   b\n# c\n")
    assert [(one.text, one.is_listing) for one in found] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]


def test_no_comment_is_no_paragraph() -> None:
    assert leading_comment("name: x\n# late\n") == ()
    assert leading_comment("") == ()


@pytest.mark.parametrize(
    ("text", "title", "rest"),
    [
        (
            "# Figure 5 of a.txt, on digits:\n#\n#   play\n",
            "Figure 5 of a.txt, on digits",
            1,
        ),
        ("# Figure 5 of a.txt: by k.\n", "Figure 5 of a.txt: by k", 0),
        ("# One. And another.\n#\n# More.\n", "", 2),
        ("#   a listing\n", "", 1),
        (f"# {'long ' * 30}\n", "", 1),
        ("name: x\n", "", 0),
    ],
)
def test_a_short_first_sentence_is_the_title(text: str, title: str, rest: int) -> None:
    found, paragraphs = split_title(leading_comment(text))
    assert (found, len(paragraphs)) == (title, rest)
