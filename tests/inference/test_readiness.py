from inference.server.readiness import Readiness


def test_a_server_is_ready_with_the_previous_policy_only_while_it_may_still_be_fetching_the_live_one() -> None:
    patient, strict = Readiness(grace_s=60), Readiness(grace_s=0)
    for each in (patient, strict):
        assert each.reason(None) == "no policy is loaded yet"
        each.see("old")
        assert each.reason("old") is None
        each.see("new")
    assert patient.reason("old") is None
    assert "policy new is live, but old is served" in str(strict.reason("old"))
    assert strict.reason("new") is None


def test_a_server_that_follows_nothing_is_ready_with_any_policy_until_it_is_withdrawn_or_drains() -> None:
    state = Readiness(grace_s=0)
    assert state.reason("any") is None
    state.withdrawn = "a drill"
    assert state.reason("any") == "withdrawn: a drill"
    state.draining = True
    assert "draining" in str(state.reason("any"))
