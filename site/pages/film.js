// Films of a step: a section.film draws the films that its data-films names, of FILMS, one below the other on one
// scale of time, and marks in the page's code where each rank stands. Times in a film are in 10 microseconds.
"use strict";

const KINDS = ["other", "parameters", "optimizer", "gradients", "activations"];
const DOES = { F: "forward", B: "backward", R: "forward again", W: "gradients of weights", O: "optimizer" };
const players = [];
const calm = matchMedia("(prefers-reduced-motion: reduce)");

const svgNode = (name, attributes, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
};
const megabytes = (bytes) => (bytes < 1e4 ? `${bytes} B` : `${(bytes / 1e6).toPrecision(3)} MB`);
const latest = (rows, time) => rows.findLast((row) => row[0] <= time);

function wordsOf(what) {
  if (what === "L") return "own lines";
  const [block, microbatch] = what.slice(1).split(".");
  return DOES[what[0]] + (block ? ` of block ${block}` : "") + (microbatch ? `, microbatch ${microbatch}` : "");
}

class Lane {
  constructor(name, given, lines) {
    Object.assign(this, { name, lines, ...given });
    this.mark = name.replace(/^(rank|device|worker) /, "").replace(/ ?([a-z]).*/, "$1"); // "rank 1 host": 1h
    this.events = [...this.spans, ...this.messages, ...this.waits].map(([time, , line]) => [time, line]);
    this.events.sort((a, b) => a[0] - b[0]);
    this.rows = []; // of messages that are on their way at the same time
    for (const message of this.messages) {
      const free = this.rows.findIndex((row) => row.at(-1)[1] <= message[0]);
      if (free < 0) this.rows.push([message]);
      else this.rows[free].push(message);
    }
    const held = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    this.stacks = this.held.map(([time, , kind, bytes]) => {
      held[kind] = bytes;
      return [time, { ...held }, Object.values(held).reduce((a, b) => a + b)];
    });
    this.most = Math.max(0, ...this.stacks.map(([, , sum]) => sum));
  }

  waitsFor([, , , number]) {
    return `waits for ${this.messages[number]?.[3] ?? "a message"}`;
  }

  lineAt(time) {
    const event = latest(this.events, time);
    return event && this.lines[event[1]][0];
  }

  /** What it does at a time: [in a word or two, what is on its way, what is held]. */
  stateAt(time) {
    const during = (rows) => rows.filter(([begin, end]) => begin <= time && time < Math.max(end, begin + 1));
    const wait = during(this.waits).at(-1);
    const span = during(this.spans).at(-1);
    let does = span ? wordsOf(span[3]) : "";
    if (wait) does = this.waitsFor(wait);
    const sums = {}; // of what is on its way
    for (const [, , , name, bytes] of during(this.messages)) {
      const [count, sum] = sums[name] || [0, 0];
      sums[name] = [count + 1, sum + bytes];
    }
    const travels = Object.entries(sums).map(([name, [count, bytes]]) => `${count > 1 ? `${count} ` : ""}${name} ${megabytes(bytes)}`);
    const stack = latest(this.stacks, time);
    return [does, travels.join(", "), stack ? megabytes(stack[2]) : ""];
  }
}

class Player {
  constructor(section) {
    this.section = section;
    this.films = section.dataset.films.split(" ").map((name) => this.read(FILMS[name]));
    this.lanes = this.films.flatMap((film) => film.lanes);
    this.length = Math.max(...this.films.map((film) => film.length));
    const moments = new Set([0, this.length, ...this.lanes.flatMap((lane) => lane.events.map(([time]) => time))]);
    this.moments = [...moments].sort((a, b) => a - b);
    this.find = (selector) => section.querySelector(selector);
    this.slider = this.find("input[type=range]");
    this.time = 0;
    this.films[0].lanes.forEach((lane) => this.find("select").add(new Option(lane.name)));
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.find(".screens"));
  }

  read(film) {
    const lanes = Object.entries(film.lanes).map(([name, lane]) => new Lane(name, lane, film.lines));
    const screen = this.section.querySelector(".screens").appendChild(document.createElement("div"));
    screen.innerHTML = `<h3>${film.lesson}.py</h3><div class="lanes"></div><table class="now"><thead><tr><td></td><th scope="col">at</th>
      <th scope="col">does</th><th scope="col">on its way</th><th scope="col">holds</th></tr></thead><tbody></tbody></table>`;
    screen.querySelector("h3").hidden = !this.section.dataset.films.includes(" ");
    return { ...film, lanes, screen };
  }

  // ---- time ----

  /** Where a time stands on the picture, from 0 to 1; and the other way round. */
  place(time) {
    if (!this.isEven) return time / this.length;
    const after = this.moments.findIndex((moment) => moment > time);
    if (after < 0) return 1;
    const [a, b] = [this.moments[after - 1], this.moments[after]];
    return (after - 1 + (time - a) / (b - a)) / (this.moments.length - 1);
  }

  timeAt(place) {
    if (!this.isEven) return place * this.length;
    const index = Math.min(Math.floor(place * (this.moments.length - 1)), this.moments.length - 2);
    const part = place * (this.moments.length - 1) - index;
    return this.moments[index] + part * (this.moments[index + 1] - this.moments[index]);
  }

  get followed() {
    return this.films.map((film) => film.lanes[this.find("select").selectedIndex] || film.lanes[0]);
  }

  step(direction) {
    const times = this.followed.flatMap((lane) => lane.events.map(([time]) => time)).sort((a, b) => a - b);
    const next = direction > 0 ? times.find((time) => time > this.time) : times.findLast((time) => time < this.time);
    this.go(next ?? (direction > 0 ? this.length : 0));
  }

  play() {
    this.playing = !this.playing;
    this.find(".play").setAttribute("aria-pressed", this.playing);
    this.find(".play").textContent = this.playing ? "❚❚" : "►";
    if (!this.playing) return;
    if (this.time >= this.length) this.go(0);
    let before = performance.now();
    const turn = (now) => {
      if (!this.playing) return;
      if (!calm.matches) this.go(this.timeAt(Math.min(1, this.place(this.time) + (now - before) / 30000)));
      else if (now - before > 800) this.step(1);
      if (!calm.matches || now - before > 800) before = now;
      if (this.time >= this.length) this.play();
      else requestAnimationFrame(turn);
    };
    requestAnimationFrame(turn);
  }

  go(time) {
    this.time = time;
    this.slider.value = 1000 * this.place(time);
    this.find("output").textContent = `${(time / 100).toFixed(1)} of ${(this.length / 100).toFixed(0)} ms`;
    this.slider.setAttribute("aria-valuetext", this.find("output").textContent);
    for (const head of this.section.querySelectorAll(".head-line")) {
      head.setAttribute("transform", `translate(${this.left + this.place(time) * this.width} 0)`);
    }
    for (const film of this.films) this.tell(film);
    if (this.films.length === 1) this.mark();
  }

  // ---- pictures ----

  draw() {
    this.left = 10 + 6 * Math.max(...this.lanes.map((lane) => lane.name.length));
    this.width = Math.max(200, this.find(".screens > div").clientWidth - this.left - 2);
    const most = Math.max(...players.flatMap((player) => player.lanes.map((lane) => lane.most))); // one scale on a page
    for (const film of this.films) {
      const svg = svgNode("svg", { width: "100%", role: "img", "aria-label": `What each rank does in a step of ${film.lesson}.py` });
      let y = 2;
      for (const lane of film.lanes) y = this.drawLane(svg, lane, y, most);
      const line = svgNode("g", { class: "head-line" });
      line.append(svgNode("line", { y1: 0, y2: y }));
      svg.append(line);
      svg.setAttribute("height", y);
      film.screen.querySelector(".lanes").replaceChildren(svg);
    }
    const height = this.section.offsetHeight; // a film that leaves room for the text below it stays in sight
    this.sticks = this.films.length === 1 && height < (innerWidth < 1100 ? 0.52 : 0.66) * innerHeight;
    this.section.classList.toggle("sticks", this.sticks);
    document.documentElement.style.setProperty("--film", this.sticks ? `${height}px` : "0px");
    this.go(this.time);
  }

  drawLane(svg, lane, y, most) {
    const x = (time) => this.left + this.place(time) * this.width;
    const box = (kind, begin, end, top, height, title) => {
      const rect = svgNode("rect", { class: kind, x: x(begin).toFixed(1), y: top, height });
      rect.setAttribute("width", Math.max(0.7, x(end) - x(begin)).toFixed(1));
      rect.append(svgNode("title", {}, title));
      svg.append(rect);
    };
    svg.append(svgNode("text", { x: 0, y: y + 11 }, lane.name));
    for (const wait of lane.waits) {
      const [begin, end] = wait;
      box("wait", begin, end, y, 14, lane.waitsFor(wait));
    }
    for (const [begin, end, , what] of lane.spans) {
      box(what[0], begin, end, y, 14, wordsOf(what));
      const label = what[1] ? what.slice(1) : "";
      if (x(end) - x(begin) > 7 * label.length + 3 && label) {
        svg.append(svgNode("text", { class: "on", x: (x(begin) + x(end)) / 2, y: y + 11 }, label));
      }
    }
    y += 16;
    for (const row of lane.rows) {
      for (const [begin, end, , name, bytes, kind] of row) box(kind, begin, end, y, 4, `${name} ${megabytes(bytes)}`);
      y += 5;
    }
    const height = !lane.most ? 0 : this.width < 400 ? 16 : 26;
    if (height) svg.append(svgNode("text", { class: "most", x: 0, y: y + 10 }, megabytes(lane.most)));
    const below = Object.fromEntries(lane.stacks.map((_, i) => [i, 0]));
    for (const kind of KINDS) {
      let [top, bottom] = ["", ""];
      lane.stacks.forEach(([time, stack], i) => {
        const until = lane.stacks[i + 1]?.[0] ?? this.length;
        const [low, high] = [below[i], below[i] + stack[kind]].map((sum) => y + height * (1 - sum / most));
        top += `L${x(time).toFixed(1)} ${high.toFixed(1)}H${x(until).toFixed(1)}`;
        bottom = `L${x(until).toFixed(1)} ${low.toFixed(1)}H${x(time).toFixed(1)}${bottom}`;
        below[i] += stack[kind];
      });
      if (top) svg.append(svgNode("path", { class: kind, d: `M${(top + bottom).slice(1)}Z` }));
    }
    return y + height + 6;
  }

  // ---- words and lines ----

  tell(film) {
    const rows = film.lanes.map((lane) => {
      const line = lane.lineAt(this.time);
      const [does, travels, held] = lane.stateAt(this.time);
      const row = document.createElement("tr");
      row.innerHTML = `<th scope="row">${lane.name}</th><td></td><td>${does}</td><td>${travels}</td><td>${held}</td>`;
      const page = document.getElementById(`L${line}`) ? "" : `${film.lesson}.html`;
      if (line) row.cells[1].innerHTML = `<a href="${page}#L${line}">line ${line}</a>`;
      return row;
    });
    film.screen.querySelector("tbody").replaceChildren(...rows);
  }

  mark() {
    document.querySelectorAll("[data-at]").forEach((node) => node.removeAttribute("data-at"));
    for (const lane of this.lanes) {
      const number = document.getElementById(`L${lane.lineAt(this.time)}`);
      if (number) number.dataset.at = `${number.dataset.at ?? ""} ${lane.mark}`.trim();
    }
    const followed = document.getElementById(`L${this.followed[0].lineAt(this.time)}`);
    if (this.wasTouched && this.sticks && !this.playing) followed?.scrollIntoView({ block: "nearest" });
  }

  // ---- what a reader does ----

  listen() {
    const touched = (action) => (event) => {
      this.wasTouched = true;
      action(event);
    };
    const on = (selector, event, action) => this.find(selector).addEventListener(event, touched(action));
    on(".play", "click", () => this.play());
    on(".back", "click", () => this.step(-1));
    on(".forth", "click", () => this.step(1));
    on("input[type=range]", "input", () => this.go(this.timeAt(this.slider.value / 1000)));
    on("select", "change", () => this.go(this.time));
    on("input[type=checkbox]", "change", (event) => {
      this.isEven = event.target.checked;
      this.draw();
    });
    on(".screens", "click", (event) => {
      const lanes = event.target.closest(".lanes");
      if (!lanes) return;
      const place = (event.clientX - lanes.getBoundingClientRect().left - this.left) / this.width;
      this.go(this.timeAt(Math.min(1, Math.max(0, place))));
    });
    this.section.addEventListener("keydown", touched((event) => {
      const does = { ArrowLeft: () => this.step(-1), ArrowRight: () => this.step(1), Home: () => this.go(0), End: () => this.go(this.length) };
      if (event.target.matches("select, a") || event.altKey || event.ctrlKey || event.metaKey || !does[event.key]) return;
      event.preventDefault();
      does[event.key]();
    }));
    if (this.films.length > 1) return;
    for (const [, line] of this.lanes.flatMap((lane) => lane.events)) {
      document.getElementById(`L${this.films[0].lines[line][0]}`)?.classList.add("filmed");
    }
    document.getElementById("code")?.addEventListener("click", (event) => {
      if (String(getSelection())) return; // who marks a text wants no other moment
      const number = event.target.closest(".code pre > span, .code pre > i")?.closest("span")?.previousSibling ?? event.target;
      const first = this.followed.concat(this.lanes).map((lane) => lane.events.find(([, line]) => `L${lane.lines[line][0]}` === number.id));
      const found = first.find(Boolean);
      if (found) touched(() => this.go(found[0]))();
    });
  }
}

for (const section of document.querySelectorAll("section.film")) players.push(new Player(section));
