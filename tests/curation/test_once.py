from __future__ import annotations

import asyncio

import pytest

from curation.once import Once


def test_work_is_done_once_for_all_who_ask_and_a_cancelled_caller_ends_it_for_no_other() -> None:
    async def run() -> tuple[list[int], int]:
        once: Once[str, int] = Once()
        runs, open_ = [0], asyncio.Event()

        async def work() -> int:
            runs[0] += 1
            await open_.wait()
            return 7

        callers = [asyncio.create_task(once.get("a", work)) for _ in range(3)]
        await asyncio.sleep(0)
        callers[0].cancel()
        await asyncio.sleep(0)
        assert not once.done("a")
        open_.set()
        found = await asyncio.gather(*callers[1:], once.get("a", work))
        assert once.done("a") and not once.done("b")
        return found, runs[0]

    assert asyncio.run(run()) == ([7, 7, 7], 1)


def test_a_failure_is_tried_again_unless_it_is_final() -> None:
    async def run() -> list[str]:
        once: Once[type[BaseException], str] = Once(TimeoutError)
        said: list[str] = []
        for kind in (ValueError, TimeoutError, asyncio.CancelledError):
            for number in range(2):

                async def work(kind: type[BaseException] = kind, number: int = number) -> str:
                    if number:
                        return "again"
                    raise kind

                try:
                    said.append(await once.get(kind, work))
                except (ValueError, TimeoutError, asyncio.CancelledError) as error:
                    said.append(type(error).__name__)
        return said

    expected = ["ValueError", "again", "TimeoutError", "TimeoutError", "CancelledError", "again"]
    assert asyncio.run(run()) == expected


def test_work_of_other_keys_goes_on_beside_a_failure() -> None:
    async def run() -> int:
        once: Once[int, int] = Once()

        async def work(key: int) -> int:
            if key == 1:
                raise ValueError(key)
            return key

        with pytest.raises(ValueError, match="1"):
            await asyncio.gather(*(once.get(key, lambda key=key: work(key)) for key in range(3)))  # type: ignore[misc]
        return await once.get(2, lambda: work(2))

    assert asyncio.run(run()) == 2
