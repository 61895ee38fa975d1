package field;

import jakarta.servlet.http.HttpSession;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.PostMapping;
import org.springframework.web.bind.annotation.RequestParam;
import org.springframework.web.bind.annotation.RestController;

/** Notes in Spring Boot: settings are read once at the start, and written by a form. Sessions are in memory, as Tomcat has them by itself. */
@SpringBootApplication
@RestController
public class Notes {
    @Value("${field.title}")
    private volatile String title;

    public static void main(String[] arguments) {
        SpringApplication.run(Notes.class, arguments);
    }

    @GetMapping("/")
    public String page() throws IOException {
        return "<h1>" + title + "</h1><p>" + Files.readString(Path.of("notes.txt"));
    }

    @PostMapping("/login")
    public String login(HttpSession session, @RequestParam String name) {
        session.setAttribute("name", name);
        return "logged in";
    }

    @GetMapping("/me")
    public String me(HttpSession session) {
        Object name = session.getAttribute("name");
        return "logged in as " + (name == null ? "nobody" : name);
    }

    @PostMapping("/settings")
    public String change(@RequestParam("title") String changed) throws IOException {
        title = changed;
        Files.writeString(Path.of("application.properties"), "field.title=" + changed + "\n");
        return "changed";
    }
}
