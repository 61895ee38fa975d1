// A person at a browser who waits for a site: one act in each run, named by the first argument.
//
//     node waiting.mjs ACT BROWSER HOST PORT
//
// It writes a line of JSON for each step it has come to, and goes on when it is sent a line; when nobody sends lines any
// more, it ends. What is wrong with a page is an error of its own. Not here: the site, its load, what is to become of
// it all (tests/tests/e2e/browser.rs).

import assert from "node:assert/strict";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

// Longest wait for anything on a page, milliseconds; only a failure takes so long.
const SOON = 20_000;

// Lowest contrast of text (WCAG 2.2, success criterion 1.4.3).
const CONTRAST_MIN = 4.5;

const TABS = 10;

const [act, executablePath, host, port] = process.argv.slice(2);
const home = `http://${host}/app.cgi`;

const input = createInterface({ input: process.stdin });
const lines = input[Symbol.asyncIterator]();

/** Tells how far it is, and waits until it is to go on. */
async function tell(step, facts = {}) {
  process.stdout.write(`${JSON.stringify({ step, ...facts })}\n`);
  const { done } = await lines.next();
  if (done) throw new Error(`nobody waits for the step after '${step}'`);
}

/** A person with a browser profile of its own. What its pages complain about and ask for is written down. */
async function person(browser, options = {}) {
  const context = await browser.newContext(options);
  context.setDefaultTimeout(SOON);
  const seen = { complaints: [], requests: [], waiting: [] };
  context.on("console", (message) => {
    // A browser calls the page's own status an error; it is what the page is sent with.
    const isStatus = message.text().includes("the server responded with a status of 503");
    if (["error", "warning"].includes(message.type()) && !(isStatus && message.location().url.split("#")[0] === home)) {
      seen.complaints.push(message.text());
    }
  });
  context.on("weberror", (error) => seen.complaints.push(String(error.error())));
  context.on("request", (request) => seen.requests.push(`${request.resourceType()} ${request.url()}`));
  context.on("response", (response) => {
    if (response.status() === 503) seen.waiting.push(response.headers());
  });
  return { context, seen };
}

/** What somebody who waits is told. */
async function told(page, seen) {
  return {
    lang: await page.locator("html").getAttribute("lang"),
    heading: await page.getByRole("heading", { level: 1 }).textContent(),
    place: await page.locator("#place").textContent(),
    clock: await page.locator("#clock").textContent(),
    begins_in: Number(seen.waiting.at(-1)["retry-after"]),
    ticket: seen.waiting.at(-1)["nagaya-ticket"],
  };
}

/** The application's page, and no other, has this heading. */
async function application(page, { heading = "The shop", url = home } = {}) {
  await page.getByRole("heading", { name: heading, exact: true }).waitFor();
  assert.equal(page.url(), url);
}

// === What is accessible ===

/** Runs in the page: everything about its structure that a screen reader relies on and that is not so. */
function structure(lang) {
  const wrong = [];
  const expect = (is, what) => is || wrong.push(what);
  expect(document.documentElement.lang === lang, `lang is '${document.documentElement.lang}'`);
  expect(document.title.trim() !== "", "no title");
  expect(document.querySelectorAll("main, [role=main]").length === 1, "not one main landmark");
  const levels = [...document.querySelectorAll("h1, h2, h3, h4, h5, h6")].map((heading) => Number(heading.tagName[1]));
  expect(levels.filter((level) => level === 1).length === 1 && levels[0] === 1, `headings begin ${levels}`);
  expect(levels.every((level, at) => at === 0 || level <= levels[at - 1] + 1), `headings skip a level: ${levels}`);
  const live = document.querySelectorAll("[aria-live=polite]");
  expect(live.length === 1 && live[0].checkVisibility(), "not one live region that is rendered");
  // A clock that were read out each second would leave no room for anything else.
  expect(document.querySelector("[role=timer]:not([aria-live])") !== null, "no silent timer");
  const outside = [...document.body.children].filter((element) => !["MAIN", "SCRIPT"].includes(element.tagName));
  expect(outside.length === 0, "content outside of the main landmark");
  const zoom = document.querySelector("meta[name=viewport]").content;
  expect(!/user-scalable|maximum-scale/.test(zoom), "it cannot be enlarged");
  return wrong;
}

/** Runs in the page: the contrast of each piece of text that is seen. */
function contrasts() {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  // Drawn over each other as the browser does it: whatever a colour is written like, and however transparent.
  const drawn = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (colour) => {
    const parts = colour.map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const [text, element] = [texts.currentNode.textContent.trim(), texts.currentNode.parentElement];
    if (text === "" || !element.checkVisibility() || element.closest("#live, script")) continue;
    const backs = [];
    for (let at = element; at; at = at.parentElement) backs.unshift(getComputedStyle(at).backgroundColor);
    const back = drawn(["Canvas", ...backs]);
    const front = drawn(["Canvas", ...backs, getComputedStyle(element).color]);
    const [low, high] = [luminance(back), luminance(front)].sort((a, b) => a - b);
    found.push({ text, back, contrast: (high + 0.05) / (low + 0.05) });
  }
  return found;
}

/** The page as somebody who sees it, hears it or enlarges it finds it, in the light and in the dark. */
async function isAccessible(page, lang) {
  assert.deepEqual(await page.evaluate(structure, lang), []);
  const backs = [];
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    const found = await page.evaluate(contrasts);
    assert.ok(found.length >= 5, `only ${found.length} pieces of text are seen`);
    assert.deepEqual(found.filter((piece) => !(piece.contrast >= CONTRAST_MIN)), [], colorScheme);
    backs.push(found[0].back.reduce((sum, part) => sum + part, 0));
  }
  assert.ok(backs[0] > backs[1], "the dark page is not darker");
  // As narrow as a page of 1280 pixels that is enlarged to 400 % (WCAG 2.2, success criterion 1.4.10).
  await page.setViewportSize({ width: 320, height: 640 });
  const width = await page.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(width <= 320, `it is ${width} pixels wide`);
}

// === The acts ===

const acts = {
  /** Waits with the page open, and touches nothing. */
  async called(browser) {
    const { context, seen } = await person(browser, { locale: "ja-JP" });
    const page = await context.newPage();
    await page.goto(home);
    const facts = await told(page, seen);
    const seconds = Number(/\d+/.exec(facts.clock)[0]);
    const moves = (before) => Number(/\d+/.exec(document.querySelector("#clock").textContent)[0]) < before;
    await page.waitForFunction(moves, seconds);
    const later = await page.locator("#clock").textContent();
    await tell("waiting", { ...facts, later });
    await application(page);
    assert.deepEqual(seen.complaints, []);
  },

  /** Waits for its slot, for a part of the page, which the browser keeps to itself. */
  async begins(browser) {
    const { context, seen } = await person(browser);
    const page = await context.newPage();
    await page.goto(`${home}#part`);
    await tell("waiting", await told(page, seen));
    await application(page, { url: `${home}#part` });
    assert.deepEqual(seen.complaints, []);
  },

  /** The same without scripts. */
  async scriptless(browser) {
    const { context, seen } = await person(browser, { javaScriptEnabled: false });
    const page = await context.newPage();
    await page.goto(home);
    const without = await page.locator("#without").isVisible();
    await tell("waiting", { ...(await told(page, seen)), without });
    await application(page);
  },

  /** Sends a form. */
  async sends(browser) {
    const { context, seen } = await person(browser, { locale: "en-GB" });
    const page = await context.newPage();
    await page.goto(home);
    await page.getByLabel("Order").fill("二つ & more\nthan + two = 100%");
    await page.getByLabel("Number").fill("7");
    await tell("filled in");
    await page.getByRole("button", { name: "Order" }).click();
    const send = page.getByRole("button", { name: "Send now" });
    await send.waitFor();
    assert.ok(await send.isDisabled(), "the button is active before it is time");
    await tell("waiting", await told(page, seen));
    await page.locator("#send:enabled").waitFor();
    assert.ok(await send.evaluate((button) => button === document.activeElement), "the button has no focus");
    assert.equal(await page.locator("#place").textContent(), "", "it is its turn, and others are said to go first");
    assert.notEqual((await page.locator("#live").textContent()).trim(), "", "nothing is said aloud");
    await tell("called");
    await send.click();
    await application(page, { heading: "Thank you" });
    assert.deepEqual(seen.complaints, []);
  },

  /** Looks closely at the page, as a visitor and as somebody who has sent a form. */
  async looks(browser) {
    const sender = await person(browser, { locale: "en-GB" });
    const form = await sender.context.newPage();
    await form.goto(home);
    await tell("has the form");
    const visitor = await person(browser, { locale: "ja-JP" });
    const page = await visitor.context.newPage();
    await page.goto(home);
    await isAccessible(page, "ja");
    await form.getByRole("button", { name: "Order" }).click();
    await form.getByRole("button", { name: "Send now", disabled: true }).waitFor();
    await isAccessible(form, "en");
    await tell("has looked");
    await form.locator("#send:enabled").waitFor();
    await isAccessible(form, "en");
    await application(page);
    for (const { seen } of [sender, visitor]) {
      assert.deepEqual(seen.complaints, []);
      const allowed = [`document ${home}`, `eventsource http://${host}/.nagaya/wait/`];
      const others = seen.requests.filter((request) => !allowed.some((known) => request.startsWith(known)));
      assert.deepEqual(others, []);
    }
  },

  /** Opens many tabs. */
  async tabs(browser) {
    const { context, seen } = await person(browser);
    const pages = [];
    const open = async () => {
      const page = await context.newPage();
      pages.push(page);
      await page.goto(home);
      await page.locator("#with").waitFor();
    };
    // The first brings the ticket that all others show.
    await open();
    await Promise.all(Array.from({ length: TABS - 1 }, open));
    // Somebody else at the same address.
    const other = await person(browser);
    await (await other.context.newPage()).goto(home);
    const waiting = [...seen.waiting, ...other.seen.waiting];
    assert.equal(waiting.length, TABS + 1);
    await tell("waiting", { tickets: waiting.map((headers) => headers["nagaya-ticket"]) });
    await Promise.any(pages.map((page) => application(page)));
  },
};

const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--headless=new", `--host-resolver-rules=MAP * 127.0.0.1:${port}`],
});
input.once("close", () => browser.close());
try {
  await acts[act](browser);
} finally {
  await browser.close();
}
process.exit();
