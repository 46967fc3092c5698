from report_world import HOSTILE

from ops.report.page import read_data


def test_an_episode_shows_what_each_component_found_and_why(hostile_page: bytes) -> None:
    shown = {episode["sample"]: episode for episode in read_data(hostile_page)["viewer"]["episodes"]}
    known, nothing = shown[0]["evidence"]
    assert known == {"name": "review", "value": 0.5, "reason": HOSTILE, "answers": [HOSTILE]}
    assert (nothing["name"], nothing["value"], nothing["reason"]) == ("style", None, "the answer is not JSON")
    assert "evidence" not in shown[1]
