"""The page in a real browser: headless Chromium, from a file, without a network."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_results import decay, write_run

from experiments.report import gather, render

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
wait = pytest.importorskip("selenium.webdriver.support.wait")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason="no Chromium: apt install chromium chromium-driver"),
]
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
PATIENCE = 60
"""Seconds for a page to be drawn, which it is in one unless the machine is busy."""
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all there can be: bands, something diverged, references, pictures, a long list of methods."""
    folder = tmp_path_factory.mktemp("results")
    x, t = np.linspace(-1, 1, 30), np.linspace(0, 1, 20)
    exact = -np.sin(np.pi * x)[:, None] * np.exp(-t)
    images = {"x": x, "t": t, "exact": exact, "predicted": 0.9 * exact}
    for variant in ("base", "anderson", "anderson+average", "average", "ema", "swa", "lookahead", "anderson[period=2]"):
        for seed in range(2 if variant == "swa" else 3):
            rows = decay(final=10.0 ** -(2 + seed / 2), name="validation_mse")
            rows = [
                row | {"relative_l2": row["validation_mse"] ** 0.5} if "validation_mse" in row else row for row in rows
            ]
            diverged = variant == "anderson" and seed == 1
            write_run(
                folder, "burgers2d", variant, seed, metrics=rows[:50] if diverged else rows, pictures=images,
                status="diverged" if diverged else "finished", references={"zero predictor": {"relative_l2": 1.0}},
            )  # fmt: skip
    long = "base[average_tolerance=0.1,average_window=10,evaluate_every=5,steps=20]"
    write_run(folder, "digits", long, 0)
    page = folder / "report.html"
    page.write_text(render(gather(folder)))
    return page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (*ARGUMENTS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, html: Path) -> Iterator[Any]:
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(html.as_uri())
    # A busy machine may be told that the page is there before its script has run to the end.
    drawn = "return document.readyState === 'complete' && document.querySelectorAll('.picture svg').length > 0"
    wait.WebDriverWait(browser, PATIENCE).until(lambda browser: browser.execute_script(drawn))
    yield browser
    assert [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def show(page: Any, kind: str) -> None:
    """Press the button that shows a kind of methods."""
    page.find_element("xpath", f"//*[@class='presets']/button[. = '{kind}']").click()


def names(page: Any, plot: int = 0) -> list[str]:
    """The curves that are drawn in a figure, by name."""
    script = "return document.querySelectorAll('.plots .plot')[arguments[0]].data.map(t => t.name).filter(Boolean)"
    return page.execute_script(script, plot)


def test_figures_are_drawn(page):
    drawn = page.execute_script(
        "return [...document.querySelectorAll('#task-burgers2d .plots .plot')]"
        ".map(plot => plot.querySelectorAll('.scatterlayer .trace path.js-line').length)"
    )
    assert len(drawn) == 2
    assert all(count >= 3 for count in drawn)
    assert names(page) == ["base", "Anderson (paper)", "Anderson + average (paper)"]
    heatmaps = page.execute_script("return document.querySelectorAll('.picture .heatmaplayer image').length")
    assert heatmaps == 6
    bands = page.execute_script("return document.querySelectorAll('#task-burgers2d .fills path').length")
    assert bands >= 3


def test_no_plot_is_wider_than_its_box(page):
    script = """return [...document.querySelectorAll('.picture, .plot')].filter(
        (plot) => plot.querySelector('svg').clientWidth > plot.clientWidth + 1).length"""
    assert page.execute_script(script) == 0


def test_nothing_is_requested_but_the_page_itself(page, html):
    events = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
    # A browser that has just been started may still be loading its own first tab.
    urls = {each["request"]["url"] for each in sent if not each["documentURL"].startswith("chrome:")}
    assert {url for url in urls if not url.startswith(("data:", "blob:"))} == {html.as_uri()}


def test_click_on_the_legend_switches_a_method_off_and_on(page):
    button = page.find_element("css selector", ".legend button[data-variant='anderson']")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert "Anderson (paper)" not in names(page, 0) + names(page, 1)
    button.click()
    assert "Anderson (paper)" in names(page, 0)
    assert "Anderson (paper)" in names(page, 1)


def test_buttons_show_a_kind_of_methods(page):
    show(page, "peers")
    assert names(page) == ["base", "EMA", "SWA", "Lookahead"]


def test_means_are_over_the_seeds_of_all_methods_shown(page):
    script = """const plot = document.querySelector('.plots .plot');
        return [document.querySelector('.seeds').textContent, plot.data.find((t) => t.name === 'base').y.at(-1)]"""
    finals = [10.0 ** -(2 + seed / 2) for seed in range(3)]
    said, value = page.execute_script(script)
    assert "3 seeds" in said and value == pytest.approx(sum(finals) / 3, rel=1e-3)
    page.find_element("css selector", ".legend button[data-variant='swa']").click()
    said, value = page.execute_script(script)
    assert "2 seeds" in said and value == pytest.approx(sum(finals[:2]) / 2, rel=1e-3)


def test_other_settings_are_in_the_legend_when_they_are_shown(page):
    variant = page.find_element("css selector", ".legend button[data-variant='anderson[period=2]']")
    assert not variant.is_displayed()
    show(page, "other settings")
    assert variant.is_displayed()


def test_another_metric_can_be_chosen(page):
    page.execute_script(
        "const select = document.querySelector('select.metric');"
        "select.value = 'relative_l2'; select.dispatchEvent(new Event('change'))"
    )
    title = page.execute_script("return document.querySelector('.plots .plot').layout.yaxis.title.text")
    assert title == "relative L2 error"
    assert "zero predictor" in names(page)


def test_readable_at_phone_width(page):
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    page.refresh()
    assert page.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    sizes = page.execute_script(
        "return [...document.querySelectorAll('body, p, td, th, li, a, button, select, label, dd, pre, code, .badge')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(sizes) >= 14
    widths = page.execute_script("return [...document.querySelectorAll('.plot svg.main-svg')].map(e => e.clientWidth)")
    assert 250 < min(widths) <= max(widths) <= 390
    scrolls = page.execute_script(
        "return [...document.querySelectorAll('.scroll')].map(e => [getComputedStyle(e).overflowX, e.clientWidth])"
    )
    assert all(overflow == "auto" and width <= 390 for overflow, width in scrolls)


def test_dark_where_the_reader_prefers_it(page):
    colour = (
        "return getComputedStyle(document.body).backgroundColor + document.querySelector('.plot').layout.font.color"
    )
    light = page.execute_script(colour)
    features = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
    assert page.execute_script(colour) != light
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
