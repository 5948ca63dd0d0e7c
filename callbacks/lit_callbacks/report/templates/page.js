// The pointer's step, the same in all panels: a line in each picture and the values there.
"use strict";
(() => {
  const main = document.querySelector("main");
  const first = Number(main.dataset.first), last = Number(main.dataset.last);
  const words = (text) => (text ? text.split(" ") : []);

  // Index of the last number that is at most `step`; -1 where there is none.
  const upTo = (numbers, step) => {
    let low = 0, high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] <= step) low = middle + 1; else high = middle;
    }
    return low - 1;
  };
  const nearest = (numbers, step) => {
    const before = upTo(numbers, step);
    if (before < 0) return 0;
    const after = before + 1;
    return after < numbers.length && numbers[after] - step < step - numbers[before] ? after : before;
  };

  const panels = [...document.querySelectorAll(".panel")].map((panel) => {
    const picture = panel.querySelector(".chart");
    return {
      picture,
      start: Number(picture.dataset.start),
      end: Number(picture.dataset.end),
      cursor: picture.querySelector(".cursor"),
      curves: [...picture.querySelectorAll("[data-run]")].map((curve) => {
        const value = panel.querySelector(`b[data-run="${curve.dataset.run}"]`);
        return {
          steps: words(curve.dataset.x).map(Number), texts: words(curve.dataset.y),
          value, latest: value.textContent,
        };
      }),
    };
  });
  const runs = [...document.querySelectorAll(".legend li")].map((item) => ({
    starts: words(item.dataset.x).map(Number), levels: words(item.dataset.y),
    level: item.querySelector(".level"),
  }));
  const at = document.querySelector(".legend .at");
  const idle = at.textContent;

  const show = (step) => {
    for (const { start, end, cursor, curves } of panels) {
      const x = start + (step - first) / (last - first) * (end - start);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      cursor.setAttribute("visibility", "visible");
      for (const { steps, texts, value } of curves) {
        const beyond = step < steps[0] || step > steps[steps.length - 1];
        value.textContent = beyond ? "-" : texts[nearest(steps, step)];
      }
    }
    for (const { starts, levels, level } of runs) {
      const word = levels[upTo(starts, step)] || "";
      level.textContent = word;
      level.className = `level ${word}`;
    }
    at.textContent = `step ${step}`;
  };
  const hide = () => {
    for (const { cursor, curves } of panels) {
      cursor.setAttribute("visibility", "hidden");
      for (const { value, latest } of curves) value.textContent = latest;
    }
    for (const { level } of runs) level.textContent = "";
    at.textContent = idle;
  };
  for (const { picture, start, end } of panels) {
    const follow = (event) => {
      const box = picture.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * picture.viewBox.baseVal.width;
      const share = Math.min(1, Math.max(0, (x - start) / (end - start)));
      show(Math.round(first + share * (last - first)));
    };
    picture.addEventListener("pointermove", follow);
    picture.addEventListener("pointerdown", follow);
    picture.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") hide();
    });
  }
})();
