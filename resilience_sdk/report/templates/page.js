// What a page does beyond showing: light or dark, copying, words beside the pointer, a line through all time axes, and
// cards that open when somebody comes to them. Everything is found by its class when it is needed, so that a section
// whose content is replaced goes on working. Texts are only ever set as text.
"use strict";
(() => {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
  const theme = document.getElementById("theme");

  const stored = (value) => {
    try {
      if (value) localStorage.setItem("resilience-theme", value);
      return localStorage.getItem("resilience-theme");
    } catch {
      return null; // a file may have no storage
    }
  };
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "")) === "dark";
  if (["light", "dark"].includes(stored())) root.dataset.theme = stored();
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored(root.dataset.theme);
  });

  const copy = async (button) => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.copy");
    if (button) copy(button);
  });

  // Somebody who comes to a card, or prints, sees what is in it.
  const open = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const card = target && target.closest("details");
    if (!card) return;
    card.open = true;
    card.querySelector("summary").focus({ preventScroll: true });
    card.scrollIntoView();
  };
  addEventListener("hashchange", open);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#']");
    if (link && link.getAttribute("href") === location.hash) open(); // the same again is no change
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((part) => { part.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((part) => { part.open = false; }));

  // Words beside the pointer, or beside what has the focus.
  const show = (text, x, y) => {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
  };
  // A browser would show the title as well, later: the words move to an attribute when they are first asked for.
  const wordsOf = (mark) => {
    const title = mark.querySelector(":scope > title");
    if (title) {
      mark.dataset.tip = title.textContent;
      title.remove();
    }
    return mark.dataset.tip;
  };
  const span = (seconds) => {
    if (seconds < 1) return `${+(seconds * 1000).toPrecision(3)} ms`;
    if (seconds < 60) return `${+seconds.toPrecision(3)} s`;
    const minutes = Math.floor(seconds / 60);
    return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const numbers = (text) => text.split(" ").map((word) => (word === "-" ? null : Number(word)));
  const read = new WeakMap();
  const pointsOf = (part) => {
    if (!read.has(part)) {
      const { name, unit, first, at, values, steps } = part.dataset;
      read.set(part, { name, unit, at: numbers(at).map((gone) => gone + Number(first)), values: numbers(values), steps: numbers(steps) });
    }
    return read.get(part);
  };
  const atMoment = (plot, moment) => {
    const lines = [];
    for (const part of plot.parentElement.querySelectorAll(":scope > .points")) {
      const { name, unit, at, values, steps } = pointsOf(part);
      let best = -1;
      at.forEach((when, index) => {
        if (values[index] !== null && (best < 0 || Math.abs(when - moment) < Math.abs(at[best] - moment))) best = index;
      });
      if (best < 0) continue;
      const value = unit === "s" ? span(values[best]) : `${values[best]} ${unit}`;
      lines.push(`${name} ${value}${steps[best] === null ? "" : ` at step ${steps[best]}`}`);
    }
    return lines;
  };
  const inRow = (row, moment) => {
    const edges = numbers(row.closest("svg").querySelector("[data-edges]").dataset.edges);
    const column = edges.findIndex((edge, index) => index + 1 < edges.length && moment >= edge && moment < edges[index + 1]);
    const value = column < 0 ? "-" : row.dataset.values.split(" ")[column];
    const rank = column < 0 || !row.dataset.ranks ? "-" : row.dataset.ranks.split(" ")[column];
    const told = value === undefined || value === "-" ? "nothing told" : `${value} times the median${rank === "-" ? "" : `, rank ${rank}`}`;
    return `${row.dataset.name}\n${told}`;
  };

  const cross = (share) => {
    document.querySelectorAll(".cross").forEach((line) => line.remove());
    if (share === null) return;
    for (const plot of document.querySelectorAll("svg.plot")) {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, value] of Object.entries({ x1: `${share * 100}%`, x2: `${share * 100}%`, y1: 0, y2: plot.getAttribute("height") - 22, class: "cross" })) {
        line.setAttribute(name, value);
      }
      plot.append(line);
    }
  };
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest?.("svg :has(> title), [data-tip]");
    const plot = event.target.closest?.("svg.plot");
    if (!plot) {
      cross(null);
      show(mark && wordsOf(mark), event.clientX, event.clientY);
      return;
    }
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const gone = share * (plot.dataset.to - plot.dataset.from);
    cross(share);
    const words = mark && mark.matches(".heat-row") ? (wordsOf(mark), inRow(mark, gone)) : mark && wordsOf(mark);
    const lines = words ? [words] : atMoment(plot, gone + Number(plot.dataset.from));
    show([...lines, `${span(gone)} after the start`].join("\n"), event.clientX, event.clientY);
  });
  document.addEventListener("pointerleave", () => { cross(null); show(null); });
  document.addEventListener("focusin", (event) => {
    const mark = event.target.closest?.("svg [tabindex], svg a");
    if (!mark || !mark.matches(":focus-visible")) return;
    const box = mark.getBoundingClientRect();
    show(wordsOf(mark) || mark.getAttribute("aria-label"), box.left + Math.min(40, box.width), box.bottom - 12);
  });
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(null);
    const row = event.target.closest?.(".heat-row");
    const next = row && { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!next) return;
    const rows = [...row.parentElement.querySelectorAll(".heat-row")];
    (rows[rows.indexOf(row) + next] || row).focus();
    event.preventDefault();
  });

  // The reader's own time, beside that of the page.
  const shown = () => {
    document.querySelectorAll("button.copy").forEach((button) => { button.hidden = false; });
    document.querySelectorAll("time:not([title])").forEach((time) => {
      time.title = `here: ${new Date(time.dateTime).toLocaleString()}`;
    });
  };
  shown();
  open();

  // A page that lives puts another content into a section: what is open stays open, and the focus where it is.
  window.replaceSection = (id, html) => {
    const section = document.getElementById(id);
    const states = new Map([...section.querySelectorAll("details")].map((part, index) => [part.id || index, part.open]));
    const focused = section.contains(document.activeElement) ? [...section.querySelectorAll("a, button, summary, [tabindex]")].indexOf(document.activeElement) : -1;
    section.innerHTML = html;
    section.hidden = !html;
    document.querySelectorAll(`nav a[href="#${id}"]`).forEach((link) => { link.hidden = !html; });
    [...section.querySelectorAll("details")].forEach((part, index) => {
      const was = states.get(part.id || index);
      if (was !== undefined) part.open = was;
    });
    if (focused >= 0) section.querySelectorAll("a, button, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
    shown();
  };
})();
