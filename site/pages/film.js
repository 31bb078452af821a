// The film of a step: draws FILM (see tools/film.py) into section.film, and marks in the code where each lane stands.
// Times are in 10 microseconds.
"use strict";

const KINDS = ["other", "parameters", "optimizer", "gradients", "activations"];
const DOES = { F: "forward", B: "backward", R: "forward again", W: "gradients of weights", O: "optimizer" };
const section = document.querySelector("section.film");
const find = (selector) => section.querySelector(selector);
const slider = find("input[type=range]");
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const prepared = (film) => Object.entries(film.lanes).map(([name, lane]) => prepare(name, lane, film.length));
const lanes = prepared(FILM);
const naive = FILM.naive ? prepared(FILM.naive) : [];
const longest = Math.max(FILM.length, FILM.naive?.length ?? 0); // what the pictures' width shows
const moments = [...new Set([0, FILM.length, ...lanes.flatMap((lane) => lane.events.map(([time]) => time))])].sort((a, b) => a - b);
const most = Math.max(...lanes.concat(naive).map((lane) => lane.most));
let [now, left, width, isEven, playing, sticks, wasTouched] = [0, 0, 0, false, false, false, false];

function svgNode(name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

function megabytes(bytes) {
  return bytes < 1e4 ? `${bytes} B` : `${(bytes / 1e6).toPrecision(3)} MB`;
}

function latest(rows, time) {
  return rows.findLast((row) => row[0] <= time);
}

/** A lane with its events in order, its messages in rows, and what is held as sums. */
function prepare(name, { spans, messages, waits, held }, length) {
  const mark = name.replace(/^(rank|device|worker) /, "").replace(/ ?([a-z]).*/, "$1"); // "rank 1 host": 1h
  const events = [...spans, ...messages, ...waits].map(([time, , line]) => [time, line]).sort((a, b) => a[0] - b[0]);
  const rows = []; // of messages that are on their way at the same time
  for (const message of messages) {
    const free = rows.findIndex((row) => row.at(-1)[1] <= message[0]);
    if (free < 0) rows.push([message]);
    else rows[free].push(message);
  }
  const current = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
  const stacks = held.map(([time, , kind, bytes]) => {
    current[kind] = bytes;
    return [time, { ...current }, Object.values(current).reduce((a, b) => a + b)];
  });
  return { name, mark, length, spans, messages, waits, events, rows, stacks, most: Math.max(0, ...stacks.map(([, , sum]) => sum)) };
}

function lineAt(lane, time) {
  return latest(lane.events, time)?.[1];
}

// ---- words ----

function wordsOf(what) {
  if (what === "L") return "own lines";
  const [block, microbatch] = what.slice(1).split(".");
  return DOES[what[0]] + (block ? ` of block ${block}` : "") + (microbatch ? `, microbatch ${microbatch}` : "");
}

function wordsOfWait(lane, wait) {
  return `waits for ${lane.messages[wait[3]]?.[3] ?? "a message"}`;
}

/** What a lane does at a time: [in a word or two, what is on its way, what is held]. */
function stateOf(lane, time) {
  const during = (rows) => rows.filter(([begin, end]) => begin <= time && time < Math.max(end, begin + 1));
  const wait = during(lane.waits).at(-1);
  const span = during(lane.spans).at(-1);
  const does = wait ? wordsOfWait(lane, wait) : span ? wordsOf(span[3]) : "";
  const sums = {}; // of what is on its way
  for (const [, , , name, bytes] of during(lane.messages)) {
    const [count, sum] = sums[name] || [0, 0];
    sums[name] = [count + 1, sum + bytes];
  }
  const travels = Object.entries(sums).map(([name, [count, bytes]]) => `${count > 1 ? `${count} ` : ""}${name} ${megabytes(bytes)}`);
  const stack = latest(lane.stacks, time);
  return [does, travels.join(", "), stack ? megabytes(stack[2]) : ""];
}

// ---- time ----

/** Where a time stands on the picture, from 0 to 1; and the other way round. */
function place(time) {
  if (!isEven) return time / longest;
  const after = moments.findIndex((moment) => moment > time);
  if (after < 0) return 1;
  const [a, b] = [moments[after - 1], moments[after]];
  return (after - 1 + (time - a) / (b - a)) / (moments.length - 1);
}

function timeAt(place) {
  if (!isEven) return Math.min(FILM.length, place * longest);
  const index = Math.min(Math.floor(place * (moments.length - 1)), moments.length - 2);
  const part = place * (moments.length - 1) - index;
  return moments[index] + part * (moments[index + 1] - moments[index]);
}

function followed() {
  return lanes[find("select").selectedIndex] || lanes[0];
}

function step(direction) {
  const times = followed().events.map(([time]) => time);
  const next = direction > 0 ? times.find((time) => time > now) : times.findLast((time) => time < now);
  go(next ?? (direction > 0 ? FILM.length : 0));
}

function play() {
  playing = !playing;
  find(".play").setAttribute("aria-pressed", playing);
  find(".play").textContent = playing ? "❚❚" : "►";
  if (!playing) return;
  if (now >= FILM.length) go(0);
  let before = performance.now();
  const turn = (clock) => {
    if (!playing) return;
    if (!calm.matches) go(timeAt(Math.min(1, place(now) + (clock - before) / 30000)));
    else if (clock - before > 800) step(1);
    if (!calm.matches || clock - before > 800) before = clock;
    if (now >= FILM.length) play();
    else requestAnimationFrame(turn);
  };
  requestAnimationFrame(turn);
}

/** Show this moment: in the picture, in words, and in the code. */
function go(time) {
  now = time;
  slider.value = 1000 * place(time);
  find("output").textContent = `${(time / 100).toFixed(1)} of ${(FILM.length / 100).toFixed(0)} ms`;
  slider.setAttribute("aria-valuetext", find("output").textContent);
  find(".head-line")?.setAttribute("transform", `translate(${left + place(time) * width} 0)`);
  document.querySelectorAll("[data-at]").forEach((node) => node.removeAttribute("data-at"));
  const rows = lanes.map((lane) => {
    const line = lineAt(lane, time);
    const number = document.getElementById(`L${line}`);
    if (number) number.dataset.at = `${number.dataset.at ?? ""} ${lane.mark}`.trim();
    const [does, travels, held] = stateOf(lane, time);
    const row = document.createElement("tr");
    const link = number ? `<a href="#L${line}">line ${line}</a>` : "";
    row.innerHTML = `<th scope="row">${lane.name}</th><td>${link}</td><td>${does}</td><td>${travels}</td><td>${held}</td>`;
    return row;
  });
  find("tbody").replaceChildren(...rows);
  if (wasTouched && sticks && !playing) document.getElementById(`L${lineAt(followed(), time)}`)?.scrollIntoView({ block: "nearest" });
}

// ---- pictures ----

function draw() {
  left = 10 + 6 * Math.max(...lanes.map((lane) => lane.name.length));
  width = Math.max(200, find(".lanes").clientWidth - left - 2);
  const [svg, y] = picture(lanes, `What each rank does in a step of ${FILM.lesson}.py`);
  if (naive.length && !isEven) document.querySelector(".film.naive").replaceChildren(picture(naive, "The same of the naive version")[0]);
  const line = svgNode("g", { class: "head-line" });
  line.append(svgNode("line", { y1: 0, y2: y }));
  svg.append(line);
  find(".lanes").replaceChildren(svg);
  const height = section.offsetHeight; // a film that leaves room for the text below it stays in sight
  sticks = height < (innerWidth < 1100 ? 0.52 : 0.66) * innerHeight;
  section.classList.toggle("sticks", sticks);
  document.documentElement.style.setProperty("--film", sticks ? `${height}px` : "0px");
  go(now);
}

function picture(lanes, label) {
  const svg = svgNode("svg", { width: "100%", role: "img", "aria-label": label });
  const y = lanes.reduce((y, lane) => drawLane(svg, lane, y), 2);
  svg.setAttribute("height", y);
  return [svg, y];
}

function drawLane(svg, lane, y) {
  const x = (time) => left + place(time) * width;
  const box = (kind, begin, end, top, height, title) => {
    const rect = svgNode("rect", { class: kind, x: x(begin).toFixed(1), y: top, height });
    rect.setAttribute("width", Math.max(0.7, x(end) - x(begin)).toFixed(1));
    rect.append(svgNode("title", {}, title));
    svg.append(rect);
  };
  svg.append(svgNode("text", { x: 0, y: y + 11 }, lane.name));
  for (const wait of lane.waits) box("wait", wait[0], wait[1], y, 14, wordsOfWait(lane, wait));
  for (const [begin, end, , what] of lane.spans) {
    box(what[0], begin, end, y, 14, wordsOf(what));
    const label = what.slice(1);
    if (label && x(end) - x(begin) > 7 * label.length + 3) {
      svg.append(svgNode("text", { class: "on", x: (x(begin) + x(end)) / 2, y: y + 11 }, label));
    }
  }
  y += 16;
  for (const row of lane.rows) {
    for (const [begin, end, , name, bytes, kind] of row) box(kind, begin, end, y, 4, `${name} ${megabytes(bytes)}`);
    y += 5;
  }
  const height = !lane.most ? 0 : width < 400 ? 16 : 26;
  if (height) svg.append(svgNode("text", { class: "most", x: 0, y: y + 10 }, megabytes(lane.most)));
  const below = lane.stacks.map(() => 0);
  for (const kind of KINDS) {
    let [top, bottom] = ["", ""];
    lane.stacks.forEach(([time, stack], i) => {
      const until = lane.stacks[i + 1]?.[0] ?? lane.length;
      const [low, high] = [below[i], below[i] + stack[kind]].map((sum) => y + height * (1 - sum / most));
      top += `L${x(time).toFixed(1)} ${high.toFixed(1)}H${x(until).toFixed(1)}`;
      bottom = `L${x(until).toFixed(1)} ${low.toFixed(1)}H${x(time).toFixed(1)}${bottom}`;
      below[i] += stack[kind];
    });
    if (top) svg.append(svgNode("path", { class: kind, d: `M${(top + bottom).slice(1)}Z` }));
  }
  return y + height + 6;
}

// ---- what a reader does ----

function on(node, event, action) {
  node.addEventListener(event, (given) => {
    wasTouched = true;
    action(given);
  });
}

lanes.forEach((lane) => find("select").add(new Option(lane.name)));
on(find(".play"), "click", play);
on(find(".back"), "click", () => step(-1));
on(find(".forth"), "click", () => step(1));
on(slider, "input", () => go(timeAt(slider.value / 1000)));
on(find("select"), "change", () => go(now));
on(find("input[type=checkbox]"), "change", (event) => {
  isEven = event.target.checked;
  draw();
});
on(find(".lanes"), "click", (event) => {
  const part = (event.clientX - find(".lanes").getBoundingClientRect().left - left) / width;
  go(timeAt(Math.min(1, Math.max(0, part))));
});
on(section, "keydown", (event) => {
  const does = { ArrowLeft: () => step(-1), ArrowRight: () => step(1), Home: () => go(0), End: () => go(FILM.length) };
  if (event.target.matches("select, a") || event.altKey || event.ctrlKey || event.metaKey || !does[event.key]) return;
  event.preventDefault();
  does[event.key]();
});
for (const [, line] of lanes.flatMap((lane) => lane.events)) document.getElementById(`L${line}`)?.classList.add("filmed");
on(document.getElementById("code"), "click", (event) => {
  if (String(getSelection())) return; // who marks a text wants no other moment
  const number = event.target.closest(".code pre > span")?.previousSibling ?? event.target;
  const moment = [followed(), ...lanes].map((lane) => lane.events.find(([, line]) => `L${line}` === number.id)).find(Boolean);
  if (moment) go(moment[0]);
});
new ResizeObserver(draw).observe(find(".lanes"));
