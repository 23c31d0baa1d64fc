// A page that is told what changes: it takes the parts that it does not show already, and says whether it still hears
// anything. What a part holds was escaped by the server; texts are only ever set as text here.
"use strict";
(() => {
  const SILENT_MS = 40000; // the server says something every 15 s
  const HIDDEN_MS = 60000; // a page that nobody sees asks for nothing
  const AGAIN_MS = 2000;
  const list = document.getElementById("rows");
  const seen = document.querySelector("meta[name=seen]");
  const known = new Map((seen ? seen.content : "").split(" ").filter(Boolean).map((one) => {
    const colon = one.lastIndexOf(":");
    return [one.slice(0, colon), one.slice(colon + 1)];
  }));
  const status = document.getElementById("live") || bar();
  let source = null;
  let silence = 0;
  let retry = 0;
  let hiding = 0;

  // The report is a file that anybody may open: what only the dashboard has is put into its bar here.
  function bar() {
    const place = document.querySelector(".top .wide");
    const made = document.createElement("span");
    made.id = "live";
    made.setAttribute("role", "status");
    const link = (text, address) => {
      const one = document.createElement("a");
      one.textContent = text;
      one.href = address;
      one.style.whiteSpace = "nowrap";
      one.style.fontSize = ".88rem";
      return one;
    };
    const back = link("\u2190 Runs", "/");
    back.id = "back";
    const save = link("Save", `/report/${location.pathname.split("/")[2]}.html`);
    save.title = "Keep this report as one file";
    save.id = "save";
    place.prepend(back);
    place.insertBefore(save, document.getElementById("theme"));
    place.insertBefore(made, save);
    return made;
  }

  function say(word, text) {
    const dot = { live: "\u25cf ", wait: "\u25cb ", lost: "\u00d7 " }[word];
    if (status.textContent === dot + text) return;
    status.textContent = dot + text;
    status.className = `live ${word}`;
    if (!list) {
      status.style.cssText = `font-size:.82rem;font-weight:600;line-height:1.25;text-align:right;color:var(--${{ live: "good", wait: "soft", lost: "bad" }[word]})`;
    }
  }

  function heard() {
    clearTimeout(silence);
    silence = setTimeout(() => lost(), SILENT_MS);
  }

  function lost() {
    stop();
    say("lost", "connection lost, trying again");
    status.title = `since ${new Date().toLocaleTimeString()}`;
    retry = setTimeout(begin, AGAIN_MS);
  }

  function stop() {
    clearTimeout(silence);
    clearTimeout(retry);
    if (source) source.close();
    source = null;
  }

  function begin() {
    stop();
    source = new EventSource(`${location.pathname.replace(/\/$/, "")}/events`);
    source.addEventListener("open", () => { say("live", "live"); status.removeAttribute("title"); heard(); });
    source.addEventListener("beat", heard);
    source.addEventListener("parts", (event) => { heard(); take(JSON.parse(event.data)); });
    source.addEventListener("error", () => {
      if (status.classList.contains("lost")) {
        stop();
        retry = setTimeout(begin, AGAIN_MS);
      } else {
        lost();
      }
    });
  }

  function take(told) {
    const changed = [];
    for (const [name, [sum, html]] of Object.entries(told.parts)) {
      if (known.get(name) === sum) continue;
      known.set(name, sum);
      changed.push(name);
      if (name === "trouble") say("lost", html);
      else show(name, html);
    }
    for (const name of told.gone) {
      known.delete(name);
      changed.push(name);
      if (name === "trouble") say("live", "live");
      else if (name.startsWith("run-")) document.getElementById(name)?.remove();
    }
    if (changed.length) {
      ages();
      document.dispatchEvent(new CustomEvent("told", { detail: { changed, html: (name) => told.parts[name]?.[1] } }));
    }
  }

  function show(name, html) {
    const place = document.getElementById(name);
    if (name.startsWith("run-") && list) {
      const made = document.createElement("template");
      made.innerHTML = html;
      const row = made.content.firstElementChild;
      const hadFocus = place && place.contains(document.activeElement);
      if (place) place.replaceWith(row);
      else list.append(row);
      if (hadFocus) row.querySelector("a")?.focus({ preventScroll: true });
    } else if (place && place.dataset.part) {
      place.innerHTML = html;
    } else if (place && window.replaceSection) {
      window.replaceSection(name, html);
    }
  }

  // How long ago, in words; the moment itself beside the pointer.
  function ages() {
    const now = Date.now();
    for (const time of document.querySelectorAll("time[data-ago]")) {
      const at = Date.parse(time.dateTime);
      if (Number.isNaN(at)) continue;
      if (!time.title) time.title = new Date(at).toLocaleString();
      const passed = Math.max(0, (now - at) / 1000);
      const [unit, size] = [["days", 86400], ["h", 3600], ["min", 60]].find((one) => passed >= 2 * one[1]) || ["s", 1];
      const text = `${Math.round(passed / size)} ${unit} ago`;
      if (time.textContent !== text) time.textContent = text;
    }
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiding);
    if (document.hidden) {
      hiding = setTimeout(() => { stop(); say("wait", "waits until somebody looks"); }, HIDDEN_MS);
    } else if (!source) {
      say("wait", "connecting");
      begin();
    }
  });
  addEventListener("pagehide", stop);
  addEventListener("pageshow", (event) => { if (event.persisted) begin(); });
  setInterval(ages, 5000);
  ages();
  say("wait", "connecting");
  begin();
})();
