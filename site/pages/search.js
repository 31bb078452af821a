// Search in what the pages say: every word of the query must begin a word there; titles count most. The index is
// loaded at first use.
"use strict";

{
  const box = document.querySelector("[type=search]");
  const list = document.getElementById("found");

  function load() {
    const script = Object.assign(document.createElement("script"), { src: "search-index.js" });
    script.addEventListener("load", search);
    document.head.append(script);
  }

  function search() {
    const words = box.value.split(/\s+/).filter(Boolean);
    const patterns = words.map((word) => RegExp(`(?<![a-z0-9])${word.replace(/[^\w]/g, "\\$&")}`, "gi"));
    list.replaceChildren();
    list.hidden = !words.length;
    if (!words.length || !window.INDEX) return;
    const times = (text, pattern) => text.match(pattern)?.length ?? 0;
    const scored = [];
    for (const [address, page, title, text] of INDEX) {
      const head = `${page} ${title}`;
      if (!patterns.every((pattern) => times(head, pattern) || times(text, pattern))) continue;
      const score = patterns.reduce((sum, pattern) => sum + 5 * times(head, pattern) + (times(text, pattern) > 1), 0);
      scored.push([score, address, page, title, snippet(text, patterns[0])]);
    }
    scored.sort((a, b) => b[0] - a[0]);
    for (const [, address, page, title, says] of scored.slice(0, 12)) {
      const link = Object.assign(document.createElement("a"), { href: address, textContent: title === page ? page : `${page}: ${title}` });
      const item = document.createElement("li");
      item.append(link, Object.assign(document.createElement("small"), { textContent: says }));
      list.append(item);
    }
    if (!scored.length) list.append(Object.assign(document.createElement("li"), { textContent: "Nothing found." }));
  }

  function snippet(text, pattern) {
    const at = Math.max(0, text.search(pattern) - 40);
    return `${at ? "…" : ""}${text.slice(at, at + 120)}`;
  }

  box.addEventListener("focus", load, { once: true });
  box.addEventListener("input", search);
  box.hidden = false;
  box.parentElement.addEventListener("focusout", (event) => {
    if (event.relatedTarget && !box.parentElement.contains(event.relatedTarget)) list.hidden = true;
  });
  document.addEventListener("click", (event) => {
    if (event.target !== box) list.hidden = true;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.matches("input, select, textarea")) {
      event.preventDefault();
      box.focus();
    }
    if (event.key === "Escape") list.hidden = true;
  });
}
