from knnper.client.flower_node import NotAcceptedError, refusal_of


def test_flowers_codes_become_advice() -> None:
    assert isinstance(refusal_of(2004, "[code: 2004] Failed"), NotAcceptedError)
    known = str(NotAcceptedError("a.key, SHA256:x", "knnper site doctor a.yaml"))
    assert "this client's key (a.key, SHA256:x)" in known
    assert known.endswith("Which of the two: knnper site doctor a.yaml")
    without_key = refusal_of(2001, "")
    assert without_key.lasting
    assert "give `tls` and `key`" in str(without_key)


def test_what_is_not_known_is_quoted_in_one_line() -> None:
    refusal = refusal_of(0, "Failed\nbecause of  this")
    assert str(refusal).endswith("did not take this client: Failed because of this")
    assert not refusal.lasting
    long = str(refusal_of(0, "Failed \x1b[2J" + "x" * 10**6))
    assert "Failed \\x1b[2J" in long
    assert len(long) < 1000
