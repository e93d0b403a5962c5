"""Takes the picture of the server's page with a classified document; needs Chromium.

python docs/images/screenshot.py http://localhost:8000 build/demo/document.txt
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

PICTURE = Path(__file__).with_name("page.png")


def main(address: str, document: Path) -> None:
    """Send a document by the page and save what it shows.

    Args:
        address: URL of a running server.
        document: the file with the text to classify.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1200, "height": 1000}, color_scheme="light")
        page.goto(address)
        page.fill("#text", document.read_text("utf-8"))
        page.press("#text", "Control+Enter")
        expect(page.locator("#answer")).to_be_visible(timeout=120_000)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
