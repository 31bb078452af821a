// Search in what the pages say: all words of the query, in titles first. The index is loaded at first use.
"use strict";

{
  const box = document.querySelector("[type=search]");
  const list = document.getElementById("found");

  function load() {
    if (document.getElementById("index")) return;
    const script = Object.assign(document.createElement("script"), { id: "index", src: "search-index.js" });
    script.addEventListener("load", search);
    document.head.append(script);
  }

  function search() {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    list.replaceChildren();
    list.hidden = !words.length;
    if (!words.length || !window.INDEX) return;
    const scored = [];
    for (const [address, page, title, text] of INDEX) {
      const [head, body] = [`${page} ${title}`.toLowerCase(), text.toLowerCase()];
      if (!words.every((word) => head.includes(word) || body.includes(word))) continue;
      const score = words.reduce((sum, word) => sum + 5 * head.includes(word) + (body.split(word).length > 2), 0);
      scored.push([score, address, page, title, snippet(text, words[0])]);
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

  function snippet(text, word) {
    const at = Math.max(0, text.toLowerCase().indexOf(word) - 40);
    return `${at ? "…" : ""}${text.slice(at, at + 120)}`;
  }

  box.addEventListener("focus", load);
  box.addEventListener("input", search);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.matches("input, select, textarea")) {
      event.preventDefault();
      box.focus();
    }
    if (event.key === "Escape") list.hidden = true;
  });
}
