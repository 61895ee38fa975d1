
(function () {
  "use strict";
  var data = document.querySelector("main").dataset;
  var element = function (id) { return document.getElementById(id); };
  var isPost = data.post === "yes";
  var begins, wait, most, hasCome = false, spoken = 0;

  function fill(text, value, other) { return text.replace("{}", value).replace("{}", other); }

  function time(seconds) {
    if (seconds <= 90) return fill(data.seconds, seconds);
    var minutes = Math.ceil(seconds / 60);
    if (minutes <= 90) return fill(data.minutes, minutes);
    return fill(data.hours, Math.floor(minutes / 60), minutes % 60);
  }

  // Moments are reckoned once, as timers of a page in the background run late.
  function at(seconds) { return seconds === null || seconds === undefined || seconds === "" ? null : Date.now() + seconds * 1000; }
  function left(moment) { return Math.max(0, Math.ceil((moment - Date.now()) / 1000)); }

  function clock() {
    if (wait === null) return data.unknown;
    if (!left(wait)) return data.soon;
    return most === null || most < wait ? fill(data.about, time(left(wait))) : fill(data.both, time(left(wait)), time(left(most)));
  }

  function place(ahead) {
    return ahead === 0 ? data.none : ahead === 1 ? data.one : fill(data.many, ahead);
  }

  // Said aloud only when there is something new, and not more often than each half minute.
  function say(text) {
    if (Date.now() - spoken < 30000) return;
    spoken = Date.now();
    element("live").textContent = text;
  }

  function come() {
    if (hasCome) return;
    hasCome = true;
    element("clock").textContent = document.title = data.turn;
    element("place").textContent = "";
    if (isPost) {
      spoken = 0;
      say(data.turn);
      element("send").disabled = false;
      element("send").focus();
    } else if (location.hash) {
      location.reload();
    } else {
      location.replace(location.href);
    }
  }

  function show() {
    if (hasCome) return;
    element("clock").textContent = clock();
    if (!left(begins)) come();
  }

  begins = at(data.begins);
  wait = at(data.wait);
  most = at(data.most);
  element("without").hidden = true;
  element("with").hidden = false;
  element("send").hidden = !isPost;
  element("send").addEventListener("click", function () { location.reload(); });
  setInterval(show, 1000);

  // Should the stream fail, the page still enters when its time has come.
  if (!window.EventSource || !data.events) return;
  var stream = new EventSource(data.events);
  stream.addEventListener("come", function () { stream.close(); come(); });
  stream.addEventListener("place", function (event) {
    var now;
    try { now = JSON.parse(event.data); } catch (error) { return; }
    if (hasCome) return;
    if (typeof now.begins_in_seconds === "number") begins = at(now.begins_in_seconds);
    if ("wait_seconds" in now) wait = at(now.wait_seconds);
    if ("at_most_seconds" in now) most = at(now.at_most_seconds);
    if (typeof now.ahead === "number" && String(now.ahead) !== data.ahead) {
      data.ahead = now.ahead;
      element("place").textContent = place(now.ahead);
      say(place(now.ahead) + " " + clock());
    }
    show();
  });
})();
