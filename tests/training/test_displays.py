"""What a loop shows: lines now and then, a bar, and what it is told to say."""

import io

import pytest

from linnet.training import Loop, displays


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_now_and_then_and_at_the_end(clock, capsys):
    lines = displays.make_display("lines", "digits", 640)
    lines.start(0)
    for step in range(1, 641):
        clock[0] += 1 / 32
        if step % 10 == 0:
            lines.show(step, {"loss": 1 / step, "accuracy": 0.5})
    lines.stop()
    assert capsys.readouterr().out.splitlines() == [
        "digits  step 160/640  loss 0.00625  accuracy 0.5  32 steps/s  0:15 left",
        "digits  step 320/640  loss 0.003125  accuracy 0.5  32 steps/s  0:10 left",
        "digits  step 480/640  loss 0.002083  accuracy 0.5  32 steps/s  0:05 left",
        "digits  step 640/640  loss 0.001563  accuracy 0.5  32 steps/s  0:00 left",
    ]


def test_lines_without_an_end_in_sight(clock, capsys):
    lines = displays.make_display("lines", "run", None)
    lines.start(7)
    for step in (8, 12):  # the first is spent on compiling
        clock[0] += 10
        lines.show(step, {})
    assert capsys.readouterr().out == "run  step 8\nrun  step 12  0.4 steps/s\n"


@pytest.mark.parametrize(("total", "count"), [(None, "3"), (100, "3/100")])
def test_the_last_line_comes_wherever_a_run_ends(clock, capsys, total, count):
    lines = displays.make_display("lines", "run", total)
    lines.start(0)
    lines.show(3, {"loss": 0.5})
    assert capsys.readouterr().out == ""
    lines.stop()
    assert capsys.readouterr().out == f"run  step {count}  loss 0.5\n"


def test_long_times_have_hours(clock, capsys):
    lines = displays.make_display("lines", "run", 20_000)
    lines.start(0)
    for step in (1, 21):
        clock[0] += 10
        lines.show(step, {})
    assert "step 21/20000  2 steps/s  2:46:30 left" in capsys.readouterr().out


@pytest.mark.parametrize(("terminal", "kind"), [(True, displays.Bar), (False, displays.Lines)])
def test_a_bar_on_a_terminal_and_lines_elsewhere(monkeypatch, terminal, kind):
    monkeypatch.setattr(displays.sys, "stdout", io.StringIO())
    monkeypatch.setattr(displays.sys.stdout, "isatty", lambda: terminal, raising=False)
    assert type(displays.make_display("auto", "run", 3)) is kind


def test_the_bar_shows_numbers_and_what_is_said(capsys):
    with Loop(range(30), show="bar", title="digits") as loop:
        for _ in loop:
            loop.log(loss=1 / loop.step)
            if loop.step == 10:
                loop.say("half [way] there")
    shown = capsys.readouterr().out
    assert "half [way] there" in shown
    assert "digits" in shown
    assert "30/30" in shown
    assert "loss 0.03333" in shown


def test_an_unknown_display():
    for show in ("graph", "silence", None, ["bar"]):
        with pytest.raises(ValueError, match="A loop cannot show ") as caught:
            Loop([], show=show)
        assert str(caught.value) == (
            f"A loop cannot show {show!r}.\nFix: choose 'auto', 'bar', 'lines' or 'nothing'."
        )
