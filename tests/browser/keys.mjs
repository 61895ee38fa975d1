// Visits a page over TLS and tells how the keys were agreed on, as a line of JSON.
//
//     node keys.mjs BROWSER HOST PORT
//
// Not here: what the node is to choose (tests/tests/e2e/tls.rs).

import { chromium } from "playwright-core";

const [executablePath, host, port] = process.argv.slice(2);

const browser = await chromium.launch({
  executablePath,
  args: [`--host-resolver-rules=MAP ${host} 127.0.0.1`, "--no-sandbox"],
});
const page = await browser.newPage({ ignoreHTTPSErrors: true });
const session = await page.context().newCDPSession(page);
await session.send("Network.enable");
const details = new Promise((resolve) => session.once("Network.responseReceived", (event) => resolve(event.response.securityDetails)));
const answer = await page.goto(`https://${host}:${port}/a.txt`);
const { protocol, keyExchange, keyExchangeGroup } = await details;
console.log(JSON.stringify({ status: answer.status(), protocol, keyExchange, keyExchangeGroup }));
await browser.close();
