// What is wrong with a page for who sees little, or touches, or listens: contrast, names, sizes.
() => {
  const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number).map((n, i) => (text.startsWith("color(") && i < 3 ? 255 * n : n));
  const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4).reduce((s, c, i) => s + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    const layers = [];
    for (; node; node = node.parentElement) layers.push(parse(getComputedStyle(node).backgroundColor));
    return layers.reverse().reduce((under, [r, g, b, a = 1]) => [r, g, b].map((c, i) => a * c + (1 - a) * under[i]), [255, 255, 255]);
  };
  const wrong = [];
  for (const node of document.querySelectorAll("main *, nav *")) {
    if (!node.checkVisibility() || node.closest("svg")) continue;
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (own) {
      const style = getComputedStyle(node), back = ground(node);
      const [r, g, b, a = 1] = parse(style.color), alpha = a * [...function*() { for (let n = node; n; n = n.parentElement) yield +getComputedStyle(n).opacity; }()].reduce((x, y) => x * y, 1);
      const [one, two] = [light([r, g, b].map((c, i) => alpha * c + (1 - alpha) * back[i])), light(back)];
      const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
      if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(1)}: ${node.tagName}.${node.className} ${node.textContent.trim().slice(0, 30)}`);
    }
    if (node.matches("button, input, select")) {
      const name = node.getAttribute("aria-label") || node.labels?.[0]?.textContent.trim() || node.textContent.trim();
      const size = node.getBoundingClientRect();
      if (!name) wrong.push(`no name: ${node.outerHTML}`);
      if (size.height < 24 && node.type !== "checkbox") wrong.push(`${size.height} pixels high: ${node.outerHTML}`);
    }
    if (node.matches("img, svg[role=img]") && !(node.alt || node.getAttribute("aria-label"))) wrong.push(`no text: ${node.outerHTML.slice(0, 80)}`);
  }
  return [...new Set(wrong)];
}
