// The list of runs can be sorted by its head and filtered by words. Both stand in the address, so that they are kept.
"use strict";
(() => {
  const rows = document.getElementById("rows");
  const filter = document.getElementById("filter");
  const nomatch = document.getElementById("nomatch");
  const shown = document.getElementById("shown");
  const asked = new URLSearchParams(location.search);
  const heads = [...document.querySelectorAll("th[data-key][scope=col]")];
  const FALLS_FIRST = ["attempt", "step", "goodput", "incident", "started", "last"];
  let order = [...rows.children].map((row) => row.id);
  let [key, falls] = [null, false];

  const valueOf = (row, name) => row.querySelector(`[data-key="${name}"]`).dataset.value;
  const compare = (a, b) => {
    const [one, other] = [valueOf(a, key), valueOf(b, key)];
    if (one === "" || other === "") return (one === "") - (other === ""); // what is not known comes last, either way
    const [x, y] = [Number(one), Number(other)];
    const by = Number.isNaN(x) || Number.isNaN(y) ? one.localeCompare(other, undefined, { numeric: true }) : x - y;
    return falls ? -by : by;
  };

  function arrange() {
    const places = new Map(order.map((id, index) => [id, index]));
    const now = [...rows.children];
    const wanted = [...now].sort((a, b) => (places.get(a.id) ?? 1e9) - (places.get(b.id) ?? 1e9));
    if (key) wanted.sort(compare);
    if (wanted.some((row, index) => row !== now[index])) {
      const focused = document.activeElement;
      rows.replaceChildren(...wanted);
      if (focused && rows.contains(focused)) focused.focus({ preventScroll: true });
    }
    for (const head of heads) {
      if (head.dataset.key === key) head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  function sift() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const row of rows.children) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      left += !row.hidden;
    }
    const all = rows.children.length;
    document.getElementById("runs").hidden = left === 0;
    document.getElementById("none").hidden = all > 0;
    nomatch.hidden = left > 0 || all === 0;
    filter.closest("label").hidden = all === 0;
    const told = words.length ? `${left} of ${all}` : "";
    if (shown.textContent !== told) shown.textContent = told;
  }

  function keep() {
    const query = new URLSearchParams();
    if (filter.value) query.set("q", filter.value);
    if (key) query.set("sort", (falls ? "-" : "") + key);
    history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  }

  function sortBy(name) {
    const first = FALLS_FIRST.includes(name);
    if (key !== name) [key, falls] = [name, first];
    else if (falls === first) falls = !first;
    else key = null;
    arrange();
    keep();
  }

  for (const head of heads) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sortBy(head.dataset.key));
    head.replaceChildren(button);
  }
  filter.addEventListener("input", () => { sift(); keep(); });
  document.getElementById("clear").addEventListener("click", () => { filter.value = ""; sift(); keep(); filter.focus(); });
  document.getElementById("counts").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    filter.value = filter.value === link.dataset.words ? "" : link.dataset.words;
    sift();
    keep();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.ctrlKey && !event.metaKey && !event.altKey && document.activeElement !== filter) {
      event.preventDefault();
      filter.focus();
      filter.select();
    } else if (event.key === "Escape" && document.activeElement === filter) {
      filter.value = "";
      sift();
      keep();
    } else if (["ArrowDown", "ArrowUp"].includes(event.key) && rows.contains(document.activeElement)) {
      const links = [...rows.querySelectorAll("tr:not([hidden]) th a")];
      const next = links[links.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1)];
      if (next) {
        event.preventDefault();
        next.focus();
      }
    }
  });
  document.addEventListener("told", (event) => {
    const told = event.detail.html("order");
    if (told !== undefined) order = told.split(" ");
    arrange();
    sift();
  });

  const sort = asked.get("sort") || "";
  if (heads.some((head) => head.dataset.key === sort.replace(/^-/, ""))) [key, falls] = [sort.replace(/^-/, ""), sort.startsWith("-")];
  filter.value = asked.get("q") || "";
  arrange();
  sift();
})();
