"""The page at / in a real browser: rows move, a prompt streams, the keyboard suffices, light and dark."""

import os
import shutil

import pytest
from server_support import Gate, running, tiny_llm, wait_until

from polytempo.types import SamplingParams

SCREENSHOTS = os.environ.get("POLYTEMPO_SCREENSHOTS")


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install selenium to test the page")
    if shutil.which("chromedriver") is None or shutil.which("chromium") is None:
        pytest.skip("chromium and its chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,1250"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def text(browser, name: str) -> str:
    return browser.find_element("id", name).text


def test_page_without_a_browser():
    """One file: nothing is loaded from anywhere else."""
    with running(tiny_llm()) as server:
        status, page = server.get("/")
    assert status == 200 and "<title>polytempo" in page
    assert not any(mark in page for mark in ("http://", "https://", "src=", "@import", "url("))


def test_prompt_and_rows(browser):
    from selenium.webdriver.common.keys import Keys

    llm = tiny_llm()
    gate = Gate(llm)
    with running(llm) as server:
        browser.get(server.url)
        wait_until(lambda: text(browser, "health") == "serving", "the page asks for the status")
        box = browser.find_element("id", "prompt")
        box.clear()
        box.send_keys("abc")
        number = browser.find_element("id", "max")
        number.clear()
        number.send_keys("20")
        gate.shut()
        box.send_keys(Keys.CONTROL, Keys.ENTER)
        wait_until(lambda: llm.engine.has_work, "the prompt arrives")
        gate.let(6)
        wait_until(lambda: text(browser, "running") == "1 of 4", "the row is shown")
        row = llm.engine.scheduler.running[0]
        # In one script: the page replaces its rows while the test looks at them.
        read = "return [...document.querySelectorAll('#rows tr')].map(r => [...r.cells].map(c => c.textContent))"
        wait_until(lambda: browser.execute_script(read)[0][2] == str(row.num_tokens), "its position is shown")
        cells = browser.execute_script(read)
        assert cells[0][0] == "0" and [line[2] for line in cells[1:]] == ["free"] * 3
        gate.open()
        wait_until(lambda: "20 output tokens" in text(browser, "note"), "it is done")
        shown = browser.execute_script("return document.getElementById('answer').textContent")
        params = SamplingParams(max_tokens=20, temperature=0)
        assert shown == "abc" + tiny_llm().generate("abc", params, progress=False)[0].outputs[0].text
        number.clear()
        number.send_keys("0")
        box.send_keys(Keys.CONTROL, Keys.ENTER)
        wait_until(lambda: "max_tokens" in text(browser, "note"), "a refusal is shown")
        gate.shut()
        number.clear()
        number.send_keys("200")
        box.send_keys(Keys.CONTROL, Keys.ENTER)
        wait_until(lambda: llm.engine.has_work, "the prompt arrives")
        box.send_keys(Keys.ESCAPE)
        wait_until(lambda: text(browser, "note") == "stopped" and not llm.engine.has_work, "Escape frees the seat")
        gate.open()
        faults = [entry for entry in browser.get_log("browser") if "400 (Bad Request)" not in entry["message"]]
        assert not faults


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser, scheme):
    """Text stands out from its ground in both; no sideways scrolling on a phone."""
    with running(tiny_llm()) as server:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                {"features": [{"name": "prefers-color-scheme", "value": scheme}]})  # fmt: skip
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                {"width": 360, "height": 700, "deviceScaleFactor": 1, "mobile": True})  # fmt: skip
        try:
            browser.get(server.url)
            wait_until(lambda: text(browser, "health") == "serving", "the page asks for the status")
            style = "return getComputedStyle(document.body)"
            ground, ink = (browser.execute_script(f"{style}.{name}") for name in ("backgroundColor", "color"))
            brightness = [sum(int(part) for part in value[4:-1].split(",")) / 3 for value in (ground, ink)]
            assert abs(brightness[0] - brightness[1]) > 150 and (brightness[0] > 128) == (scheme == "light")
            assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
        finally:
            browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.skipif(SCREENSHOTS is None, reason="POLYTEMPO_SCREENSHOTS names no folder to write docs/page.png to")
def test_screenshot(browser):
    """The demo model at work, for the docs."""
    from concurrent.futures import ThreadPoolExecutor

    from polytempo.llm import LLM

    llm = LLM(max_rows=6, max_model_len=512, draft_len=2, progress=False)
    prompts = ["import os\n", "class Stack:\n    def push(self, item):\n" * 4, "def main():\n", "# " * 60, '"""Read']
    with running(llm, model_name="polytempo-demo") as server, ThreadPoolExecutor() as pool:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.get(server.url)
        for place, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": 130 + 40 * place, "temperature": 0.3, "seed": place,
                    "ignore_eos": True}  # fmt: skip
            pool.submit(server.post, "/v1/completions", body)
        wait_until(lambda: len(llm.engine.scheduler.running) == 5, "rows run")
        browser.find_element("id", "send").click()
        wait_until(lambda: len(browser.find_element("id", "answer").text) > 120, "it writes")
        wait_until(lambda: float(text(browser, "rate")) > 0, "a rate is shown")
        browser.save_screenshot(os.path.join(SCREENSHOTS, "page.png"))
