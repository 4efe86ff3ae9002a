from simulation.reproducing.leading_comment import Paragraph, leading_comment


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
