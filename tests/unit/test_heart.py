"""The heart of a process: what it calls goes on, whatever one of them does."""

from __future__ import annotations

import logging
import threading

import pytest

from headwater.runtime.heart import Heart


class Beats:
    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.count = 0
        self.enough = threading.Event()

    def beat(self) -> bool:
        self.count += 1
        if self.count >= 3:
            self.enough.set()
        if self.fails:
            raise RuntimeError("a beat that fails")
        return True


def test_a_beat_that_raises_is_tried_again_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    heart = Heart()
    failing, sound = Beats(True), Beats(False)
    with caplog.at_level(logging.CRITICAL):
        heart.add(failing.beat, 0.01)
        heart.add(sound.beat, 0.01)
        assert failing.enough.wait(10) and sound.enough.wait(10)
        heart.close()
